"""SocketProtocol: uvicorn's WebSocket, with the messages that are being read counted as bodies are."""

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from serving.gateway.body_budget import BodyBudget
from serving.gateway.errors import TooManyBodies


class SocketProtocol(WebSocketsSansIOProtocol):
    """One connection. It is closed, to be opened again later, when its message finds no room."""

    def __init__(self, *args: Any, budget: BodyBudget, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._share = budget.share()

    def data_received(self, data: bytes) -> None:
        try:
            self._share.grow(len(data))
        except TooManyBodies as error:
            self._refuse(error)
        else:
            super().data_received(data)
            if not (self.frames or self.conn.reader.buffer):  # between messages: pings and the like
                self._share.release()

    def send_receive_event_to_app(self) -> None:
        super().send_receive_event_to_app()
        self._share.release()

    def connection_lost(self, exc: Exception | None) -> None:
        self._share.release()
        super().connection_lost(exc)

    def _refuse(self, error: TooManyBodies) -> None:
        self.frames = []
        if not self.close_sent and self.handshake_complete:
            self.close_sent = True
            self.conn.send_close(CloseCode.TRY_AGAIN_LATER, str(error)[:120])
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()
