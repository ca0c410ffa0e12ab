"""The one exception the front doors turn into a plain sentence and exit code 2."""


class RequestError(ValueError):
    """The request was wrong: the message is one sentence that names the offending value and
    what would be accepted. Front doors print it without a traceback and exit with code 2."""
