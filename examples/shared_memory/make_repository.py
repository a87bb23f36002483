"""Writes the repository of this example: one model, `echo`, that answers its input.

python make_repository.py FOLDER
"""

import sys
from pathlib import Path

CONFIG = """name: "echo"
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU }
"""


def main() -> None:
    folder = Path(sys.argv[1]) / "echo"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(CONFIG)


if __name__ == "__main__":
    main()
