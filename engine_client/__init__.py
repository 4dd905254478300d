"""engine_client: drive one or many inference-engine processes from plain blocking Python.

See ``connect`` (engines that you start), ``launch`` (engines that it starts) and ``EngineClient``.
"""

from __future__ import annotations

from engine_client._version import __version__
from engine_client.client import EngineClient, connect, connect_bootstrapped
from engine_client.deadline import USE_DEFAULT
from engine_client.engines import EngineInfo, Pending
from engine_client.errors import (
    AbandonedError,
    CallTimeout,
    ClientBrokenError,
    ClientClosedError,
    ConsensusError,
    DuplicateRequestError,
    EncodeError,
    EngineClientError,
    EngineDeadError,
    EngineError,
    HandshakeError,
    HandshakeTimeout,
    NotSentError,
    ProtocolError,
    RefusedError,
    RemoteError,
    ReplyError,
    RequestRefusedError,
    StreamAborted,
    StreamError,
    StreamOverflow,
    StreamTimeout,
    UtilityCallError,
    UtilityTimeoutError,
)
from engine_client.lora import LoraRequest
from engine_client.outcome import Failed, Ok, Outcomes, UtilityCall
from engine_client.output import Completion, EngineOutput, FinishReason, Logprobs
from engine_client.request import EngineRequest
from engine_client.sampling import PoolingParams, SamplingParams
from engine_client.stats import ClientStats
from engine_client.stream import RequestStream
from engine_client.tensors import Tensor
from engine_client.tools.launcher import launch

__all__ = [
    "USE_DEFAULT",
    "AbandonedError",
    "CallTimeout",
    "ClientBrokenError",
    "ClientClosedError",
    "ClientStats",
    "Completion",
    "ConsensusError",
    "DuplicateRequestError",
    "EncodeError",
    "EngineClient",
    "EngineClientError",
    "EngineDeadError",
    "EngineError",
    "EngineInfo",
    "EngineOutput",
    "EngineRequest",
    "Failed",
    "FinishReason",
    "HandshakeError",
    "HandshakeTimeout",
    "Logprobs",
    "LoraRequest",
    "NotSentError",
    "Ok",
    "Outcomes",
    "Pending",
    "PoolingParams",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "ReplyError",
    "RequestRefusedError",
    "RequestStream",
    "SamplingParams",
    "StreamAborted",
    "StreamError",
    "StreamOverflow",
    "StreamTimeout",
    "Tensor",
    "UtilityCall",
    "UtilityCallError",
    "UtilityTimeoutError",
    "__version__",
    "connect",
    "connect_bootstrapped",
    "launch",
]
