"""The error of every wrong setting."""


class ConfigError(ValueError):
    """A setting is wrong; the message begins with its key."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
