"""The servers measured in one run, each behind the same small face.

A peer is started with the exchange it has to serve; where it is absent from the machine, `AbsentError` says what would
bring it.
"""

from bench.peers.base import AbsentError, Peer
from bench.peers.grpc_aio import GrpcAioEcho
from bench.peers.inferd import Inferd, InferdGrpcio, InferdPython
from bench.peers.nghttpd import Nghttpd
from bench.peers.triton import Triton

__all__ = ["AbsentError", "GrpcAioEcho", "Inferd", "InferdGrpcio", "InferdPython", "Nghttpd", "Peer", "Triton"]
