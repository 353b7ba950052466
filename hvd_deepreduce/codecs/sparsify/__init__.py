"""Sparsifiers, which select the elements to send. One file each; importing this package registers all of them."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
