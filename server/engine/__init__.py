"""Models from repositories, brought to readiness and served: `engine.Engine` puts it together.

Its folders from the ground up; each imports from those before it only: `housekeeping` (how work is done beside
requests), `pbtxt` (config.pbtxt as text), `repository` (what lies where), `config` (what a configuration means: rules,
specification), `instances` (threads and devices), `models` (what there is), `loading` (models come and go), `caching`
(answers kept in Redis).
"""
