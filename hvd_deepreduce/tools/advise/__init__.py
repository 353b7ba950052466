"""Which preset pays on a given link: measured speeds, predicted times, and what presets lose."""
