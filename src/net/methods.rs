//! The methods that whole streams and their halves have in common, written once.

/// What can be done with a stream's receiving side; `$stream` is the field that leads to it.
macro_rules! reading {
    ($($stream:tt)+) => {
        /// The next piece of what the peer sent, in the buffer that it was received into; `None` when the peer has
        /// finished. Never an empty piece. Dropped before it is done, it has taken nothing.
        ///
        /// # Errors
        /// When the connection failed, once everything that came before was received (within
        /// [`close_timeout`](crate::WorkerConfig::close_timeout)), or was ended by a limit; on an accepted connection also
        /// when the runtime was asked to stop and nothing that arrived is left
        /// ([`keep_receiving_on_stop`](super::TcpStream::keep_receiving_on_stop)).
        #[inline]
        pub fn recv(&mut self) -> impl Future<Output = std::io::Result<Option<crate::Buf>>> {
            crate::net::stream::Recv(&self.$($stream)+)
        }

        /// [`recv`](Self::recv), for use in streams and other futures.
        #[inline]
        pub fn poll_recv(
            &mut self,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<std::io::Result<Option<crate::Buf>>> {
            self.$($stream)+.poll_recv(cx)
        }

        /// [`recv`](Self::recv) without waiting.
        ///
        /// # Errors
        /// `WouldBlock` when nothing is there; else as [`recv`](Self::recv).
        pub fn try_recv(&mut self) -> std::io::Result<Option<crate::Buf>> {
            self.$($stream)+.try_recv()
        }

        /// What [`recv`](Self::recv) will give next, without taking it: another lease on the same buffer.
        ///
        /// # Errors
        /// As [`recv`](Self::recv).
        pub async fn peek(&mut self) -> std::io::Result<Option<crate::Buf>> {
            std::future::poll_fn(|cx| self.$($stream)+.poll_peek(cx)).await
        }

        /// Waits until [`recv`](Self::recv) would not have to: until something is there, or the end.
        ///
        /// # Errors
        /// As [`recv`](Self::recv).
        pub async fn readable(&mut self) -> std::io::Result<()> {
            self.peek().await.map(drop)
        }

        /// Fills `room`, by copying. Dropped before it is done, it has taken nothing.
        ///
        /// # Errors
        /// `UnexpectedEof` when the peer finishes before; else as [`recv`](Self::recv). What it had found by then can
        /// still be received.
        pub async fn recv_exact(&mut self, room: &mut [u8]) -> std::io::Result<()> {
            crate::net::stream::RecvExact::new(&self.$($stream)+, room).await
        }

        /// Appends what is there to `buf`, at least one byte and at most `most`, by copying; for bulk data that is to
        /// lie in one piece. Gives back how much that was (0 when the peer has finished, or `most` is 0) and the
        /// buffer. Dropped before it is done, it has taken nothing (but `buf` is dropped with it).
        pub async fn recv_into(&mut self, buf: Vec<u8>, most: usize) -> (std::io::Result<usize>, Vec<u8>) {
            self.$($stream)+.recv_into(buf, most).await
        }
    };
}

/// What can be done with a stream's sending side.
macro_rules! writing {
    ($($stream:tt)+) => {
        /// Queues bytes for sending, without copying them, as soon as less than the high-water mark
        /// ([`WorkerConfig::high_water`](crate::WorkerConfig::high_water)) waits to be sent. They go out with this turn's
        /// operations. Dropped before it is done, it has sent nothing.
        ///
        /// # Errors
        /// When the connection has ended, or its sending side was shut down.
        #[inline]
        pub fn send(
            &mut self,
            payload: impl Into<crate::Payload>,
        ) -> impl Future<Output = std::io::Result<()>> {
            self.$($stream)+.send(payload.into())
        }

        /// Queues bytes now, whatever the marks say.
        ///
        /// # Errors
        /// [`SendError`](crate::SendError) with the payload, when [`send_limit`](crate::WorkerConfig::send_limit) bytes are
        /// waiting or the connection is not open for sending.
        #[inline]
        pub fn try_send(&mut self, payload: impl Into<crate::Payload>) -> Result<(), crate::SendError> {
            self.$($stream)+.try_send(payload.into())
        }

        /// [`send`](Self::send), and waits until the kernel has taken it.
        ///
        /// # Errors
        /// As [`send`](Self::send); and when it was queued and the connection ended before it was sent.
        pub async fn send_all(&mut self, payload: impl Into<crate::Payload>) -> std::io::Result<()> {
            self.$($stream)+.send(payload.into()).await?;
            self.flush().await
        }

        /// Queues several pieces, one behind the other and with nothing in between: a header of a few bytes in front
        /// of a received buffer, say, which is forwarded as it is. Dropped while it waits for the
        /// [`send_limit`](crate::WorkerConfig::send_limit), it has queued a part; before that, nothing.
        ///
        /// # Errors
        /// As [`send`](Self::send).
        pub async fn send_vectored<P: Into<crate::Payload>>(
            &mut self,
            pieces: impl IntoIterator<Item = P>,
        ) -> std::io::Result<()> {
            self.$($stream)+.send_vectored(pieces.into_iter().map(Into::into)).await
        }

        /// Waits until the kernel has taken everything that was queued.
        ///
        /// # Errors
        /// When it cannot: the connection has ended, other than by both sides having finished.
        pub async fn flush(&mut self) -> std::io::Result<()> {
            std::future::poll_fn(|cx| self.$($stream)+.poll_flush(cx)).await
        }

        /// [`flush`](Self::flush), for use in other futures.
        pub fn poll_flush(
            &mut self,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<std::io::Result<()>> {
            self.$($stream)+.poll_flush(cx)
        }

        /// Waits until [`send`](Self::send) would not have to.
        ///
        /// # Errors
        /// As [`send`](Self::send).
        pub async fn writable(&mut self) -> std::io::Result<()> {
            std::future::poll_fn(|cx| self.$($stream)+.poll_writable(cx)).await
        }

        /// [`writable`](Self::writable), for use in other futures.
        pub fn poll_writable(
            &mut self,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<std::io::Result<()>> {
            self.$($stream)+.poll_writable(cx)
        }

        /// Bytes queued or being sent that the kernel has not taken yet.
        pub fn unsent(&self) -> u64 {
            self.$($stream)+.unsent()
        }

        /// Tells the peer, after what is queued, that nothing more will be sent. Receiving goes on.
        pub fn shutdown(&mut self) {
            self.$($stream)+.shutdown();
        }
    };
}

/// What concerns the connection as a whole.
macro_rules! connection {
    ($($stream:tt)+) => {
        /// Its name, as [`Remote`](crate::Remote) and traces have it.
        pub fn id(&self) -> crate::ConnId {
            self.$($stream)+.link.id.get()
        }

        /// Why the connection is over, if it is.
        pub fn close_reason(&self) -> Option<crate::CloseReason> {
            self.$($stream)+.close_reason()
        }
    };
}

pub(super) use {connection, reading, writing};
