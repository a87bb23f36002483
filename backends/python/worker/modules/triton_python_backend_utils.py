"""Makes the parent folder the package that models know by this name.

It cannot be imported, because the model's interpreter need not have inferd. The folder of this file is on `sys.path`,
so processes that a model spawns can import it, too.
"""

import importlib.util
import sys

PACKAGE = "inferd_worker"  # hides no module of the model

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
