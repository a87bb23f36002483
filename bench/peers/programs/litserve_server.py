"""A LitServe server: the numbers of a POST to /predict come back. Run as: litserve_server.py PORT"""

import sys

import litserve


class Echo(litserve.LitAPI):
    def setup(self, device) -> None:
        pass

    def decode_request(self, request):
        return request["input"]

    def predict(self, x):
        return x

    def encode_response(self, output):
        return {"output": output}


if __name__ == "__main__":
    server = litserve.LitServer(Echo(), accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", log_level="warning", generate_client_file=False)
