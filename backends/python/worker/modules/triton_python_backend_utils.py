"""Makes the folder above the package that models know by this name.

Not by an import, because the interpreter is the model's own and need not have inferd. The folder of this file is on
`sys.path`, so that also processes that a model spawns, which begin anew, can import what the model's file imports.
"""

import importlib.util
import sys

PACKAGE = "inferd_worker"  # hides nothing of the model's

if PACKAGE not in sys.modules:
    _folder = __file__.rpartition("/modules/")[0]
    _spec = importlib.util.spec_from_file_location(
        PACKAGE, _folder + "/__init__.py", submodule_search_locations=[_folder]
    )
    assert _spec is not None and _spec.loader is not None
    _package = importlib.util.module_from_spec(_spec)
    sys.modules[PACKAGE] = _package
    _spec.loader.exec_module(_package)

sys.modules[__name__] = importlib.import_module(PACKAGE + ".utils")
