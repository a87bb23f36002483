"""What the fuzzer has found worth keeping, played again: workers that say anything at any time."""

from pathlib import Path

from tests.fuzz.player import Stage

SCRIPTS = Path(__file__).parents[2] / "fuzz" / "corpus" / "worker"


def test_scripts_of_the_fuzzer(tmp_path: Path) -> None:
    """Each request gets one answer, no memory remains lent, and the next worker comes up, whatever a worker sends."""
    scripts = sorted(SCRIPTS.iterdir())
    assert len(scripts) > 50
    stage = Stage(tmp_path)
    try:
        for script in scripts:
            stage.play(script.read_bytes())
    finally:
        stage.close()
