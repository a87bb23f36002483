"""A mosec server: the body of a POST to /inference comes back."""

from mosec import Server, Worker


class Echo(Worker):
    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, num=1)
    server.run()
