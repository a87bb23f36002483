import ssl

class Tls:
    def __init__(self, connection: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None: ...
