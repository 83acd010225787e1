"""Weights from a learner to engines, with proof that they arrived."""

from rl_core.weights.publish import (
    BFLOAT16_TOLERANCES,
    ProofTolerances,
    PublishReport,
    check_receipt,
    prove_canary,
    publish_weights,
    retry_proof,
)
from rl_core.weights.transports import FOLDER_PREFIX, SHARED_MEMORY, SharedFileTransport, TensorTransport
from rl_core.weights.update import (
    AdapterUpdate,
    Broadcast,
    Canary,
    RoutedScores,
    TensorDigest,
    WeightReceipt,
    WeightReceiver,
    WeightTransport,
    WeightUpdate,
    digest_tensors,
    probe_tensor,
    probe_vector,
    tensor_crc32c,
)

__all__ = [
    "BFLOAT16_TOLERANCES",
    "FOLDER_PREFIX",
    "SHARED_MEMORY",
    "AdapterUpdate",
    "Broadcast",
    "Canary",
    "ProofTolerances",
    "PublishReport",
    "RoutedScores",
    "SharedFileTransport",
    "TensorDigest",
    "TensorTransport",
    "WeightReceipt",
    "WeightReceiver",
    "WeightTransport",
    "WeightUpdate",
    "check_receipt",
    "digest_tensors",
    "probe_tensor",
    "probe_vector",
    "prove_canary",
    "publish_weights",
    "retry_proof",
    "tensor_crc32c",
]
