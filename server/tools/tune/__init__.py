"""`inferd tune`: searches the configuration of a model with the most throughput within limits of latency and memory.

It serves a copy of the model by a server of its own and changes the copy's configuration, one field at a time. It keeps
a change that pays, and then tries the other fields again, until no change pays.

search          which setting to try next, and which of the tried ones is best
configurations  settings read from, and written into, configurations
trial           the server with the copy of the model
pair            two servers, to measure a setting beside the best one so far
running         a whole search
"""
