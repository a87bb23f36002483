"""All features at once, for a long time: `python -m bench.mixed`.

`repository` writes the models, `clients` are the kinds of client, `hostile` those that do not read, `run` brings a
server and all of them together and judges.
"""
