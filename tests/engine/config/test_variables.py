"""`${NAME}` in config.pbtxt: what it becomes, what it may not be, and that nothing else of the text changes."""

from pathlib import Path

import pytest

from inferd.server.engine.config import Options
from inferd.server.engine.config.reading import read_written
from inferd.server.engine.pbtxt.variables import Variables
from inferd.server.errors import ConfigError

FILE = Path("config.pbtxt")
ENVIRONMENT = {
    "MODEL_BATCH": "16",
    "MODEL_EMPTY": "",
    "MODEL_QUOTED": 'a"b',
    "MODEL_LINES": "a\nb",
    "MODEL_API_KEY": "secret",
    "HOME": "/root",
    "AWS_SECRET_ACCESS_KEY": "secret",
}


def fill(text: str, *allowed: str) -> str:
    return Variables(allowed or ("MODEL_*",), ENVIRONMENT).fill(text, FILE)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("max_batch_size: ${MODEL_BATCH}", "max_batch_size: 16"),
        ("max_batch_size: ${MODEL_BATCH:-4}", "max_batch_size: 16"),
        ("max_batch_size: ${MODEL_OTHER:-4}", "max_batch_size: 4"),
        ("dims: [ ${MODEL_DIMS:-3, 224, 224} ]", "dims: [ 3, 224, 224 ]"),
        ('a: "${MODEL_EMPTY:-x}y"', 'a: "xy"'),
        ('a: "${MODEL_OTHER:-}"', 'a: ""'),
        ('a: "b # ${MODEL_BATCH} c" # ${UNKNOWN', 'a: "b # 16 c" # ${UNKNOWN'),
        ('a: "\\" # ${MODEL_BATCH}" # it\'s ${X}', 'a: "\\" # 16" # it\'s ${X}'),
        ("a: '\"${MODEL_BATCH}'", "a: '\"16'"),
        ('a: "$${MODEL_BATCH} $1 $$X"', 'a: "${MODEL_BATCH} $1 $$X"'),
        ('EXECUTION_ENV_PATH: "$$TRITON_MODEL_DIRECTORY/e"', 'EXECUTION_ENV_PATH: "$$TRITON_MODEL_DIRECTORY/e"'),
    ],
)
def test_a_variable_becomes_its_value(text: str, filled: str) -> None:
    assert fill(text) == filled


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a\nb ${MODEL_OTHER}", "config.pbtxt:2: variable MODEL_OTHER is not set or empty"),
        ("${HOME}", "config.pbtxt:1: variable HOME may not be used by a configuration.*--config-variable=HOME"),
        ("${HOME:-x}", "variable HOME may not be used"),
        ("${MODEL_API_KEY}", "variable MODEL_API_KEY may not be used"),
        ("${AWS_SECRET_ACCESS_KEY}", "may not be used"),
        ('"${MODEL_QUOTED}"', "MODEL_QUOTED has a quote"),
        ('"${MODEL_LINES}"', "MODEL_LINES has a quote, a backslash or a control character"),
        ("${MODEL_BATCH", r"expected \$\{NAME\}"),
        ("${max batch}", r"expected \$\{NAME\}"),
    ],
)
def test_what_no_configuration_may_have_is_an_error(text: str, error: str) -> None:
    """Clients see a configuration: it must not bring them what the environment keeps from them."""
    with pytest.raises(ConfigError, match=error) as raised:
        fill(text)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "value",
    ["${skip_special_tokens}", "a ${HOME} b", "${MODEL_API_KEY}", "${a.b}", "${", "${max batch"],
)
@pytest.mark.parametrize("form", ['string_value: "{}"', "string_value : '{}'", 'string_value:\n "{}"'])
def test_a_placeholder_in_the_value_of_a_parameter_stays_and_is_warned_of(
    value: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Templates of TensorRT-LLM's models leave such placeholders, which their code looks for."""
    text = 'parameters {{ key: "x" value {{ {} }} }}'.format(form.replace("{}", value))
    assert fill(text) == text
    (warning,) = caplog.messages
    assert "config.pbtxt:" in warning
    assert "is left as it is" in warning
    assert "secret" not in warning


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('string_value: "${MODEL_OTHER}"', "MODEL_OTHER is not set"),
        ('string_value: "${HOME:-x}"', "HOME may not be used"),
        ('key: "${HOME}"', "HOME may not be used"),
        ('string_value: "x" } key: "${HOME}"', "HOME may not be used"),
    ],
)
def test_what_is_meant_as_a_variable_in_a_parameter_is_still_one(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        fill(text)
    assert fill('string_value: "${MODEL_BATCH}"') == 'string_value: "16"'


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        fill("${HOME}\n${MODEL_OTHER}\n${MODEL_BATCH}")
    assert [line.split(": ")[0] for line in str(raised.value).splitlines()] == ["config.pbtxt:1", "config.pbtxt:2"]


@pytest.mark.parametrize(
    ("allowed", "name", "may"),
    [
        ("HOME", "HOME", True),
        ("MODEL_API_KEY", "MODEL_API_KEY", True),
        ("*", "HOME", True),
        ("*", "MODEL_API_KEY", False),
    ],
)
def test_the_operator_says_what_may_be_used(allowed: str, name: str, may: bool) -> None:
    """A pattern never lets out what sounds like a secret; its very name does."""
    if may:
        assert fill(f"${{{name}}}", allowed) == ENVIRONMENT[name]
    else:
        with pytest.raises(ConfigError, match="may not be used"):
            fill(f"${{{name}}}", allowed)


def test_a_models_configuration_has_its_variables(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "identity"\nmax_batch_size: ${MODEL_BATCH:-4}\n')
    config, source = read_written(tmp_path / "m", Options(variables=Variables(environment=ENVIRONMENT)))
    assert config.max_batch_size == 16
    assert source.at("max_batch_size").endswith("config.pbtxt:2")
