"""An engine with a response cache, for the tests of each kind of cache."""

import numpy as np

from inferd.server.engine.config import Options
from inferd.server.engine.engine import Engine
from tests.engine.serving import CONFIG, Counting, Loader, infer, request, row

CACHED = CONFIG + "response_cache { enable: true }"


class Cached:
    """An engine with the model "m", and others if configurations for them are given."""

    def __init__(self, root, cache, execute=None, files=None, **configs):
        self.model = execute or Counting()
        configs = configs or {"m": CACHED}
        for name, config in configs.items():
            (root / name / "1").mkdir(parents=True, exist_ok=True)
            (root / name / "config.pbtxt").write_text(config)
        for name, content in (files or {}).items():
            (root / "m" / "1" / name).write_text(content)
        self.engine = Engine([root], Loader(dict.fromkeys(configs, self.model)), Options(), cache=cache)

    async def __aenter__(self):
        assert await self.engine.start() == []
        return self

    async def __aexit__(self, *_):
        await self.engine.close()

    async def ask(self, *values):
        await self.ask_row(row(*values))

    async def ask_row(self, x):
        answer = await infer(self.engine, request(x=x))
        np.testing.assert_array_equal(answer.array(), 2 * x)

    def counts(self, *names):
        return tuple(self.engine.infer.reuse()[name] for name in names)
