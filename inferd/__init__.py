"""inferd: what is installed of the server is in this package; the client is `inferd_client`.

In the source tree its parts are folders beside this one, and links lead to them.
"""
