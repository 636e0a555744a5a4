//! Wakers without memory: a waker is a name.
//!
//! What a [`Waker`] carries is not a pointer but a packed name: which hub (a worker's executor), which
//! task slot, which generation of it. So cloning one copies a word and dropping one does nothing: no
//! reference count, no atomic operation, no allocation, and no way to use memory that is gone. A name that is out
//! of date wakes nothing, or (when its generation came round again, or its hub's number was given to
//! another one) wakes a task for nothing, which every future must bear anyway.
//!
//! * Woken on the thread that runs the hub's tasks: the task is put into the ready queue; no atomics.
//! * Woken anywhere else: a message to the worker's mailbox. When that is full the hub is told to poll every
//!   task: a wake may come twice, never not at all.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{RawWaker, RawWakerVTable, Waker};

use crate::worker::Remote;

use super::hub::Hub;
use super::message::{Kind, Message};

/// Bits of a name's parts; together a pointer's.
#[cfg(target_pointer_width = "64")]
const BITS: [u32; 3] = [14, 24, 26];
#[cfg(target_pointer_width = "32")]
const BITS: [u32; 3] = [6, 18, 8];

/// Tasks that one hub holds at most.
pub(super) const MAX_TASKS: usize = (1 << BITS[1]) - 1;

/// Which task of which hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TaskName {
    pub(super) hub: u32,
    pub(super) slot: u32,
    /// The low bits of the slot's generation.
    pub(super) generation: u32,
}

impl TaskName {
    pub(super) fn new(hub: u32, slot: u32, generation: u32) -> Self {
        Self { hub, slot, generation: generation & ((1 << BITS[2]) - 1) }
    }

    /// Whether this names a slot's use of that generation.
    pub(super) fn is_generation(self, generation: u32) -> bool {
        self.generation == generation & ((1 << BITS[2]) - 1)
    }

    fn pack(self) -> *const () {
        let bits = (self.hub as usize) << (BITS[1] + BITS[2])
            | (self.slot as usize) << BITS[2]
            | self.generation as usize;
        std::ptr::without_provenance(bits)
    }

    fn unpack(data: *const ()) -> Self {
        let bits = data.addr();
        let part = |shift: u32, width: u32| (bits >> shift & ((1 << width) - 1)) as u32;
        Self {
            hub: part(BITS[1] + BITS[2], BITS[0]),
            slot: part(BITS[2], BITS[1]),
            generation: part(0, BITS[2]),
        }
    }

    /// The waker that carries this name.
    pub(super) fn waker(self) -> Waker {
        let raw = RawWaker::new(self.pack(), &VTABLE);
        // SAFETY: the functions of the table take the data for a number and never for an address, so every
        // rule about clones, drops and threads is kept (invariant 10).
        unsafe { Waker::from_raw(raw) }
    }
}

static VTABLE: RawWakerVTable = RawWakerVTable::new(
    |data| RawWaker::new(data, &VTABLE),
    |data| wake(TaskName::unpack(data)),
    |data| wake(TaskName::unpack(data)),
    |_| (),
);

thread_local! {
    /// The hub whose tasks this thread is running.
    static CURRENT: RefCell<Option<Rc<Hub>>> = const { RefCell::new(None) };
}

/// Runs `with` on the hub whose tasks this thread is running.
pub(super) fn with_current<R>(with: impl FnOnce(Option<&Rc<Hub>>) -> R) -> R {
    // At the end of a thread there may be no place any more, and then there is no hub either.
    let mut with = Some(with);
    let ran = CURRENT.try_with(|current| with.take().map(|with| with(current.borrow().as_ref())));
    match (ran, with) {
        (Ok(Some(value)), _) => value,
        (_, Some(with)) => with(None),
        (_, None) => unreachable!("`with` is taken only where its value is returned"),
    }
}

/// Makes `hub` the current one until the guard is dropped.
pub(super) fn make_current(hub: Rc<Hub>) -> Current {
    Current { before: CURRENT.with(|current| current.replace(Some(hub))) }
}

/// See [`make_current`].
pub(super) struct Current {
    before: Option<Rc<Hub>>,
}

impl Drop for Current {
    fn drop(&mut self) {
        let before = self.before.take();
        let over = CURRENT.with(|current| current.replace(before));
        drop(over);
    }
}

fn wake(name: TaskName) {
    let is_local = with_current(|hub| match hub {
        Some(hub) if hub.number() == name.hub => {
            hub.tasks.make_ready(name);
            true
        }
        _ => false,
    });
    if !is_local {
        wake_remotely(name);
    }
}

#[cold]
fn wake_remotely(name: TaskName) {
    let hubs = HUBS.read().unwrap_or_else(PoisonError::into_inner);
    let Some(Some(hub)) = hubs.get(name.hub as usize) else { return };
    hub.wake(name);
}

/// How a hub is reached from other threads.
pub(super) struct Reach {
    pub(super) worker: usize,
    pub(super) remote: Remote<Message>,
}

impl Reach {
    fn wake(&self, name: TaskName) {
        // When it is full every task is polled. A stopped worker polls nobody.
        self.remote.post_or_mark(self.worker, Message(Kind::Wake(name)));
    }

    /// Makes the worker look whether it has something to do.
    pub(super) fn nudge(&self) {
        self.remote.nudge(self.worker);
    }
}

/// All hubs of the process by number.
static HUBS: RwLock<Vec<Option<Arc<Reach>>>> = RwLock::new(Vec::new());

/// A hub's place among [`HUBS`], given back when it is dropped.
pub(super) struct Registration {
    pub(super) number: u32,
}

impl Registration {
    /// # Panics
    /// When there are more workers with tasks in the process than names can tell apart: 16,384.
    pub(super) fn new(reach: Arc<Reach>) -> Self {
        let mut hubs = HUBS.write().unwrap_or_else(PoisonError::into_inner);
        let free = hubs.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            hubs.push(None);
            hubs.len() - 1
        });
        assert!(number < 1 << BITS[0], "more than {} workers with tasks in one process", 1 << BITS[0]);
        hubs[number] = Some(reach);
        Self { number: number as u32 }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut hubs = HUBS.write().unwrap_or_else(PoisonError::into_inner);
        let reach = hubs[self.number as usize].take();
        drop(hubs);
        // It may be the last one who knows the mailboxes, and what is dropped with those may wake somebody.
        drop(reach);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_name_survives_the_way_through_a_waker(
            hub in 0u32..1 << BITS[0], slot in 0u32..1 << BITS[1], generation in any::<u32>(),
        ) {
            let name = TaskName::new(hub, slot, generation);
            prop_assert_eq!(TaskName::unpack(name.pack()), name);
            prop_assert!(name.is_generation(generation));
            let waker = name.waker();
            prop_assert!(waker.will_wake(&waker.clone()));
            prop_assert_eq!(waker.data(), name.pack());
        }
    }

    #[test]
    fn a_waker_that_outlives_everything_wakes_nobody() {
        let waker = TaskName::new((1 << BITS[0]) - 1, 7, 3).waker();
        std::thread::spawn(move || {
            waker.wake_by_ref();
            drop(waker.clone());
            waker.wake();
        })
        .join()
        .expect("nothing happens");
    }
}
