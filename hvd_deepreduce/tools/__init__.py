"""The command ``hvd-deepreduce``, also ``python -m hvd_deepreduce`` (docs/command.md). A job imports none of this."""
