"""`inferd perf`: puts a model under load and reports the results.

plan        the arguments of the command line: levels of load, windows, limits
requests    the messages that are sent
measuring   one level: windows until they agree, with the server's statistics of them
streaming   the same for streams and decoupled models
report      tables, histograms, files
running     a whole run
"""
