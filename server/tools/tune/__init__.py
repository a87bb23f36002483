"""`inferd tune`: searches the configuration of a model with the most throughput within limits of latency and memory.

It serves a copy of the model by a server of its own and changes the copy's configuration, one field at a time. It keeps
a change that pays, and repeats earlier trials only if the change may have made them better.

search          which setting to try next, and which of the tried ones is best
configurations  settings read from, and written into, configurations
trial           the server with the copy of the model
running         all of it
"""
