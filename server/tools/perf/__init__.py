"""`inferd perf`: puts a model under load and tells what comes of it.

plan        what the command line asks for: levels of load, windows, limits
requests    the messages that are sent
measuring   one level: windows until they agree, with the server's own account of them
streaming   the same for streams and decoupled models
report      tables, histograms, files
running     all of it
"""
