"""ServerSettings: what a server is told besides the settings of its engine."""

from dataclasses import dataclass

from dspark.config.checks import require_choice, require_int, require_number
from dspark.config.errors import ConfigError

METRICS_PREFIXES: tuple[str, ...] = ("dspark", "vllm")
LOG_LEVELS: tuple[str, ...] = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServerSettings:
    """How a server meets its clients.

    Args:
        host, port: where it listens; port 0 takes a free one.
        served_model_names: what clients may call the model; the first one is in every response.
        api_keys: one of them must be given, except to /health and the page; none lets everyone in.
        cors_origins: origins of web pages that may call the server; none by default.
        max_waiting: requests that wait at most, besides those that run.
        request_timeout_s: seconds after which a request is ended, its body's arrival included.
        max_body_bytes: longest request body.
        metrics_prefix: "dspark", or "vllm" for dashboards that read those names.
        drain_s: seconds for which running requests may go on after a signal to end.
        log_level: of the log on stderr.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ("dspark",)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_waiting: int = 1024
    request_timeout_s: float = 600.0
    max_body_bytes: int = 16 * 1024 * 1024
    metrics_prefix: str = "dspark"
    drain_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        require_int("port", self.port, low=0, high=65535)
        require_int("max_waiting", self.max_waiting, low=0)
        require_number("request_timeout", self.request_timeout_s, above=0.0)
        require_int("max_body_bytes", self.max_body_bytes, low=1024)
        require_choice("metrics_prefix", self.metrics_prefix, METRICS_PREFIXES)
        require_number("drain_seconds", self.drain_s, low=0.0)
        require_choice("log_level", self.log_level, LOG_LEVELS)
        if not self.host:
            raise ConfigError("host is empty: give an address to listen at, such as 127.0.0.1")
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("served_model_name is empty: give the name that clients call the model")
        for key in self.api_keys:
            if not key or not key.isascii() or any(character.isspace() for character in key):
                raise ConfigError("an API key must be non-empty ASCII text without spaces")
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(f"cors_origin must be * or begin with http:// or https://, not {origin!r}")

    @property
    def model_name(self) -> str:
        """What responses call the model."""
        return self.served_model_names[0]
