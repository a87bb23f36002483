"""Configurations as JSON text, as clients send them with load requests."""

import pytest

from inferd.server.engine.config import config_from_json

STRICT = '{"name": "m", "max_batch_size": 4, "input": [{"name": "a,}", "data_type": "TYPE_FP32", "dims": ["-1"]}]}'


@pytest.mark.parametrize(
    "text",
    [
        "{name: 'm', max_batch_size: 4, input: [{name: 'a,}', data_type: 'TYPE_FP32', dims: [-1]}]}",
        '{"name": "m", "maxBatchSize": 4, "input": [{"name": "a,}", "dataType": "TYPE_FP32", "dims": [-1,],},],}',
        '{"name": "m", "max_batch_size": 4, "input": {"name": "a,}", "data_type": "TYPE_FP32", "dims": [-1]}}',
    ],
)
def test_the_forms_that_protobufs_parser_for_cpp_takes(text: str) -> None:
    """Guards keys without quotes, single quotes, commas behind the last item, and an object for a list of one."""
    assert config_from_json(text) == config_from_json(STRICT)


@pytest.mark.parametrize("text", ["it's", 'a \\"b\\"', "{x: 1,}", "x:y", "\\u00e9", "\\n"])
def test_texts_are_not_changed_by_leniency(text: str) -> None:
    """What looks like a key or a comma within quotes stays."""
    strict = config_from_json(f'{{"parameters": {{"k": {{"string_value": "{text}"}}}}}}')
    assert config_from_json(f'{{parameters: {{"k": {{"string_value": "{text}",}}}},}}') == strict
    single = text.replace("'", "\\'").replace('\\"', '"')
    assert config_from_json(f"{{parameters: {{'k': {{string_value: '{single}'}}}}}}") == strict


@pytest.mark.parametrize("text", ["", "[1]", "{", "{max_batch_size: four}", "{nothing: 1}", "{input: 1}", "[" * 9999])
def test_what_is_no_configuration_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        config_from_json(text)
