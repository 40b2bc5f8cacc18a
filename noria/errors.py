"""The error tree: one class per failure that a user can meet, each with a stable `code`.

A message says what was wrong, the value seen, and what to do about it. `code` is API: it travels over HTTP and is never renamed.
This module deliberately knows nothing of HTTP: the one table from code to status lives in `api/`.
"""

from typing import ClassVar


class NoriaError(Exception):
    """Root of the tree. Catch this to catch every failure that noria raises on purpose."""

    code: ClassVar[str] = "noria_error"


class ConfigError(NoriaError):
    """A run, server or cluster file that cannot be used: unknown key, wrong type, contradictory values."""

    code = "config_invalid"


class ModelFileMissingError(NoriaError):
    """A weight or tokenizer file that should exist does not."""

    code = "model_file_missing"


class ModelFileCorruptError(NoriaError):
    """A weight or tokenizer file that exists but cannot be read, or lacks tensors, or has tensors of the wrong shape."""

    code = "model_file_corrupt"


class ModelUnsupportedError(NoriaError):
    """A readable model whose architecture, quantization or RoPE type noria does not implement."""

    code = "model_unsupported"


class PromptTooLongError(NoriaError):
    """A prompt that leaves no room for a sampled token in the model's context, or exceeds a server limit."""

    code = "prompt_too_long"


class InvalidRequestError(NoriaError):
    """A sample request whose parameters are out of range (empty prompt, ids outside the vocabulary, max_tokens < 1, ...)."""

    code = "request_invalid"


class RequestCancelledError(NoriaError):
    """The request was cancelled by its caller, or its run was stopped."""

    code = "request_cancelled"


class StageStoppedError(NoriaError):
    """A sampler or learner that is shutting down, or has failed, was asked for work."""

    code = "stage_stopped"


class DeadlineExceededError(NoriaError):
    """A wait that passed its deadline; the message names what was waited for and for how long."""

    code = "deadline_exceeded"


class QueueFullError(NoriaError):
    """A tenant has as many requests waiting as it may have; the message says how many, and what to do."""

    code = "queue_full"


class EnvironmentFailedError(NoriaError):
    """A tenant's environment raised, or could not be loaded or built."""

    code = "environment_failed"


class EnvironmentOutputError(NoriaError):
    """A tenant's environment returned something that cannot be used: a NaN reward, a non-text observation, a wrong type."""

    code = "environment_output_invalid"


class RewardNotFiniteError(EnvironmentOutputError):
    """A reward that is NaN or infinite. It drops its episode; it is never counted as 0."""

    code = "reward_not_finite"


class ChatTemplateError(NoriaError):
    """A model without a chat template was given messages, or its template is broken, or refused the messages it was given."""

    code = "chat_template_invalid"


class DatasetError(NoriaError):
    """A file of training examples that cannot be read, or a line of it that cannot be used; the message names the line."""

    code = "dataset_invalid"


class AdapterFormatError(NoriaError):
    """An adapter folder of a kind that noria cannot read, or an adapter that the asked format cannot express."""

    code = "adapter_format"


class TreeTooLargeError(NoriaError):
    """A batch has a path (one episode) that does not fit in the largest microbatch."""

    code = "tree_too_large"


class GradientNotFiniteError(NoriaError):
    """A run's gradient has NaN or infinite values: the step is refused and the adapter stays as it was."""

    code = "gradient_not_finite"


class OperationFailedError(NoriaError):
    """An operation of the learner failed on the device for a reason that no other class names, such as memory; the message has the cause."""

    code = "operation_failed"


class PublishProofError(NoriaError):
    """After a publish, the sampler's adapter is not the one that was committed. The run stops."""

    code = "publish_proof_failed"


class SlotsExhaustedError(NoriaError):
    """The runs of one operation do not fit in the learner's adapter slots beside those in use."""

    code = "slots_exhausted"


class AdapterFileCorruptError(NoriaError):
    """An adapter or moments file that cannot be read, or does not match its recorded checksum."""

    code = "adapter_file_corrupt"


class UnknownVersionError(NoriaError):
    """A (run, version) that does not exist or is no longer kept."""

    code = "version_unknown"


class StateConflictError(NoriaError):
    """The state folder belongs to another configuration, another server is using it, or an operation does not fit the state it meets."""

    code = "state_conflict"


class StorageError(NoriaError):
    """A file or folder that cannot be written: no permission, no space left, or something else lies in its place."""

    code = "storage_failed"


class RunFailedError(NoriaError):
    """A run that cannot go on; the message carries the cause (all its tasks quarantined, its publish proof failed, ...)."""

    code = "run_failed"
