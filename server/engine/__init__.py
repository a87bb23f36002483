"""Loads models from repositories and serves them: `engine.Engine` composes it.

The folders from the lowest layer up; each imports only from those before it: `housekeeping` (work beside requests),
`pbtxt` (configurations as text), `repository` (the files of models), `config` (the meaning of a configuration: rules,
specification), `instances` (threads, devices, clients' shared memory), `models` (the loaded models), `loading` (loads
and unloads), `caching` (responses kept in Redis).
"""
