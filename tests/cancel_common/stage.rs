//! Chance, and operations that are cut off by it, on the real kernel.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::task::{JoinError, JoinHandle};
use corelane::time::timeout;

use super::cancel_common;
use super::support::{PATIENCE, Rng, any_port};

/// What widens the search.
pub const SEEDS: &str = "CORELANE_CANCEL_SEEDS";

pub fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var(SEEDS) else { return 0..12 };
    let parsed = text.split_once("..").map_or_else(
        || text.parse().map(|one: u64| one..one + 1),
        |(from, to)| from.parse().and_then(|from| to.parse().map(|to| from..to)),
    );
    parsed.unwrap_or_else(|_| panic!("{SEEDS} is {text:?}: write 7 or 0..500"))
}

/// How often operations were done, and cut.
pub type Tally = BTreeMap<&'static str, [u64; 2]>;

/// Chance, and what has become of the operations.
pub struct Stage {
    rng: RefCell<Rng>,
    pub tally: RefCell<Tally>,
    /// How many have bound something: a name for the next.
    bound: Cell<u32>,
}

pub type Shared = Rc<Stage>;

impl Stage {
    pub fn new(seed: u64) -> Shared {
        Rc::new(Self { rng: RefCell::new(Rng::new(seed)), tally: RefCell::default(), bound: Cell::new(0) })
    }

    pub fn below(&self, n: usize) -> usize {
        self.rng.borrow_mut().within(0, n - 1)
    }

    /// Runs a future for so long as chance has it, and then drops it where it is.
    pub async fn cut<F: Future>(&self, what: &'static str, future: F) -> Option<F::Output> {
        let below = |n: u64| self.below(n as usize) as u64;
        let (window, patience) = (Duration::from_millis(2), Duration::from_millis(2));
        let outcome = match below(cancel_common::WAYS + 1) {
            cancel_common::WAYS => match timeout(PATIENCE, future).await {
                Ok(output) => Some(output),
                Err(_) => panic!("{what}: not done after {PATIENCE:?}"),
            },
            way => cancel_common::cut(way, below, window, patience, future).await,
        };
        self.tally.borrow_mut().entry(what).or_default()[usize::from(outcome.is_none())] += 1;
        outcome
    }

    /// Tries an operation again and again until one try gets there.
    pub async fn until_done<T, F: Future<Output = T>>(
        &self,
        what: &'static str,
        mut attempt: impl FnMut() -> F,
    ) -> T {
        loop {
            if let Some(output) = self.cut(what, attempt()).await {
                return output;
            }
        }
    }

    /// Waits for a task by futures that are cut off.
    pub async fn join<T>(&self, mut task: JoinHandle<T>) -> Result<T, JoinError> {
        loop {
            if let Some(outcome) = self.cut("join", &mut task).await {
                return outcome;
            }
        }
    }

    pub async fn bind(&self) -> (TcpListener, SocketAddr) {
        let listener = self.until_done("bind", || TcpListener::bind(any_port())).await.expect("bound");
        let addr = listener.local_addr().expect("its address");
        (listener, addr)
    }

    pub async fn accept(&self, listener: &mut TcpListener) -> TcpStream {
        loop {
            if let Some(accepted) = self.cut("accept", listener.accept()).await {
                return accepted.expect("accepted");
            }
        }
    }

    /// A path for a socket.
    pub fn path(&self, seed: u64) -> PathBuf {
        self.bound.set(self.bound.get() + 1);
        let name = format!("corelane-cancel-{}-{seed}-{}.sock", std::process::id(), self.bound.get());
        let path = std::env::temp_dir().join(name);
        drop(std::fs::remove_file(&path));
        path
    }
}
