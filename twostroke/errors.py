"""Every error a user can see, in one tree.

    TwostrokeError
    ├── ConfigError                 a setting that cannot work                     (exit 2)
    ├── ModelError                  a checkpoint that is missing or damaged        (exit 3)
    │   └── UnsupportedModelError   sound, but not something this engine runs
    ├── RequestError                a request that is wrong                        (HTTP 400)
    │   ├── UnsupportedFieldError   a field we do not implement
    │   └── ContextLengthError      prompt + output cannot fit
    ├── ModelNotFoundError          the request names a model not served here      (HTTP 404)
    ├── AuthenticationError         missing or wrong API key                       (HTTP 401)
    ├── BodyTooLargeError           an HTTP body beyond the limit                  (HTTP 413)
    ├── QueueFullError              too many requests wait already                 (HTTP 429)
    ├── EngineLoadingError          the model is still being loaded                (HTTP 503)
    └── EngineDeadError             the engine behind the API is gone              (HTTP 503)

A message says what happened and with which value, then the limit, then a hint:
"prompt has 9,214 tokens but this model serves at most 8,192; shorten the prompt or restart
with --max-model-len 16384".
"""


class TwostrokeError(Exception):
    """Base of all errors meant for users. `hint` says what to do about it."""

    http_status = 500
    code: str | None = None
    error_type = "server_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(TwostrokeError):
    """A flag, environment variable or configuration file that cannot work."""


class ModelError(TwostrokeError):
    """A checkpoint that cannot be found, read or trusted."""


class UnsupportedModelError(ModelError):
    """A sound checkpoint of a kind that this engine does not run."""


class RequestError(TwostrokeError):
    """A request that is wrong. `param` names the field, as OpenAI's clients expect."""

    http_status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class UnsupportedFieldError(RequestError):
    """A field that OpenAI's API has and this server does not implement (yet)."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, exceeds what the model or KV pool holds."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""

    http_status = 404
    code = "model_not_found"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    http_status = 401
    code = "invalid_api_key"


class QueueFullError(TwostrokeError):
    """The bounded queue is full. `retry_after_s` goes into the Retry-After header."""

    http_status = 429
    code = "queue_full"
    error_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class EngineDeadError(TwostrokeError):
    """The engine-core process, or a worker behind it, is gone."""

    http_status = 503
    code = "engine_dead"


class EngineLoadingError(TwostrokeError):
    """The model is still being loaded. `retry_after_s` goes into the Retry-After header."""

    http_status = 503
    code = "engine_loading"

    def __init__(self, message: str, *, retry_after_s: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class BodyTooLargeError(RequestError):
    """An HTTP body beyond the server's limit."""

    http_status = 413
    code = "body_too_large"
