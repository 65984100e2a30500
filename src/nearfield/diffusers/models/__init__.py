"""The models that `apply` knows: one module per family, one `Spec` per class.

Defining a spec makes its class known, so this module only imports the others.
"""

import pkgutil
from importlib import import_module

for _found in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")
