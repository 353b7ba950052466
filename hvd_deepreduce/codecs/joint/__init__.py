"""Joint codecs: indices and values in one code. One file each; importing this package registers them all."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
