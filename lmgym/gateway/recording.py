"""The replies of a session, for a program that is started again: the same requests get the same replies."""

import hashlib

from lmgym.gateway.wire import Answer, ChatRequest, Refused


class Recording:
    """Replies by the digests of their requests.

    Example:
        >>> recording, asked = Recording(), ChatRequest((Said("user", "2+2="),))
        >>> recording.add(asked, Answer(0, [Reply(Said("assistant", "4"), "stop")]))
        >>> recording.rewind()
        >>> recording.again(asked).number
        0
    """

    def __init__(self) -> None:
        self._replies: list[tuple[bytes, Answer | Refused]] = []
        self._waiting: list[int] = []  # those that the program has not asked for again

    def add(self, request: ChatRequest, reply: Answer | Refused) -> None:
        """Note what a request got."""
        self._replies.append((_digest(request), reply))

    def rewind(self) -> None:
        """Begin at the first one: the program does, too."""
        self._waiting = list(range(len(self._replies)))

    def again(self, request: ChatRequest) -> Answer | Refused | None:
        """What the request got before; None if it is a new one, after all those before were asked again. Raises
        RuntimeError for a new one before that: then the program is no function of its input and of the replies."""
        if not self._waiting:
            return None
        digest = _digest(request)
        place = next((place for place in self._waiting if self._replies[place][0] == digest), None)
        if place is None:
            raise RuntimeError(
                "the program was killed and started again, and then asked something else than before; it must be a "
                "function of its input, its replies and LMGYM_SEED to go on where it was"
            )
        self._waiting.remove(place)
        return self._replies[place][1]


def _digest(request: ChatRequest) -> bytes:
    return hashlib.sha256(repr(request).encode(errors="surrogatepass")).digest()
