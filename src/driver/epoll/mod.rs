//! epoll: readiness made into completions.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{Chain, Memory};
use crate::config::{ConnectConfig, WorkerConfig};
use crate::metrics::Counters;
use crate::time::Time;

use super::{
    AcceptMode, CloseHow, Driver, DriverInfo, Event, Key, ListenerId, Multishot, Native, SetupError, Socket,
    Waker,
};

pub(crate) struct EpollDriver {}

#[derive(Clone)]
pub struct EpollWaker {}

impl Waker for EpollWaker {
    fn wake(&self) {
        unimplemented!()
    }
}

impl Native for EpollDriver {
    fn open(_: &WorkerConfig, _: Arc<Counters>, _: Option<u64>) -> Result<(Self, DriverInfo), SetupError> {
        unimplemented!()
    }
}

impl Driver for EpollDriver {
    type Listener = TcpListener;
    type Waker = EpollWaker;
    fn memory(&self) -> &Memory {
        unimplemented!()
    }
    fn now(&self) -> Time {
        unimplemented!()
    }
    fn clock(&self) -> Time {
        unimplemented!()
    }
    fn waker(&self) -> EpollWaker {
        unimplemented!()
    }
    fn add_listener(&mut self, _: TcpListener) -> io::Result<ListenerId> {
        unimplemented!()
    }
    fn multishot(&self) -> Multishot {
        unimplemented!()
    }
    fn accept(&mut self, _: ListenerId, _: AcceptMode) {
        unimplemented!()
    }
    fn cancel_accept(&mut self, _: ListenerId) {
        unimplemented!()
    }
    fn remove_listener(&mut self, _: ListenerId) {
        unimplemented!()
    }
    fn adopt(&mut self, _: Key, _: Socket) {
        unimplemented!()
    }
    fn discard(&mut self, _: Socket) {
        unimplemented!()
    }
    fn connect(&mut self, _: Key, _: &ConnectConfig) -> io::Result<()> {
        unimplemented!()
    }
    fn recv(&mut self, _: Key) {
        unimplemented!()
    }
    fn cancel_recv(&mut self, _: Key) {
        unimplemented!()
    }
    fn send(&mut self, _: Key, _: Chain) {
        unimplemented!()
    }
    fn cancel_send(&mut self, _: Key) {
        unimplemented!()
    }
    fn shutdown_write(&mut self, _: Key) {
        unimplemented!()
    }
    fn close(&mut self, _: Key, _: CloseHow) {
        unimplemented!()
    }
    fn submit_and_wait(&mut self, _: Option<Duration>) -> io::Result<()> {
        unimplemented!()
    }
    fn next_event(&mut self) -> Option<Event> {
        unimplemented!()
    }
    fn has_events(&self) -> bool {
        unimplemented!()
    }
    fn in_flight(&self) -> usize {
        unimplemented!()
    }
    fn finish(self, _: Duration) -> usize {
        unimplemented!()
    }
}
