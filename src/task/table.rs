//! The tasks of one worker: slots with generations, and the queue of those to be polled.
//!
//! ```text
//!            spawn             taken from the queue            Pending
//!   (free) ─────────► Queued ───────────────────────► Running ─────────► Waiting
//!                       ▲                              │    │               │
//!                       │          woken meanwhile     │    │ Ready, panic  │ woken
//!                       ├──────────────────────────────┘    ▼               │
//!                       │                                 (free)            │
//!                       └───────────────────────────────────────────────────┘
//! ```
//!
//! Who owns the future: the slot, through its cell; while Running the poll on the stack borrows it. An abort drops
//! it at once, except while Running (a task that aborts itself): then when that poll has returned.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::metrics::Counters;

use super::join::{AnyTask, End};
use super::waker::{MAX_TASKS, TaskName};

const NONE: u32 = u32::MAX >> 1;

/// 24 bytes: there is one for each connection's task.
struct Slot {
    generation: u32,
    /// The next free slot, and whether this one is in the queue ([`QUEUED`]).
    next_free: u32,
    task: Option<Rc<dyn AnyTask>>,
}

/// In [`Slot::next_free`]: numbers of slots are shorter.
const QUEUED: u32 = 1 << 31;

impl Slot {
    fn is_queued(&self) -> bool {
        self.next_free & QUEUED != 0
    }

    /// Notes whether it is in the queue; returns whether it was.
    fn set_queued(&mut self, queued: bool) -> bool {
        let before = self.is_queued();
        self.next_free = if queued { self.next_free | QUEUED } else { self.next_free & !QUEUED };
        before
    }
}

pub(super) struct Table {
    hub: u32,
    slots: RefCell<Vec<Slot>>,
    free: Cell<u32>,
    live: Cell<usize>,
    /// To be polled in this turn.
    ready: RefCell<VecDeque<u32>>,
    closed: Cell<bool>,
    /// The task that is being polled, and whether it is put off: polled again in the next turn, and not before.
    current: Cell<Option<TaskName>>,
    put_off: Cell<bool>,
    counters: Arc<Counters>,
}

impl Table {
    pub(super) fn new(hub: u32, counters: Arc<Counters>) -> Self {
        Self {
            hub,
            slots: RefCell::default(),
            free: Cell::new(NONE),
            live: Cell::new(0),
            ready: RefCell::default(),
            closed: Cell::new(false),
            current: Cell::new(None),
            put_off: Cell::new(false),
            counters,
        }
    }

    /// Tasks that have not ended.
    pub(super) fn len(&self) -> usize {
        self.live.get()
    }

    /// Takes a task in, to be polled in this turn. `None`, with the task dropped, when the worker has ended.
    ///
    /// # Panics
    /// When the worker holds as many tasks as names can tell apart (16 million).
    pub(super) fn insert(&self, task: Rc<dyn AnyTask>) -> Option<TaskName> {
        if self.closed.get() {
            return None;
        }
        let mut slots = self.slots.borrow_mut();
        let index = self.free.get();
        let index = if index == NONE {
            assert!(slots.len() < MAX_TASKS, "more than {MAX_TASKS} tasks on one worker");
            slots.push(Slot { generation: 0, next_free: NONE, task: None });
            slots.len() as u32 - 1
        } else {
            self.free.set(slots[index as usize].next_free & !QUEUED);
            index
        };
        let slot = &mut slots[index as usize];
        slot.task = Some(task);
        self.live.set(self.live.get() + 1);
        self.counters.tasks_spawned.add(1);
        self.counters.tasks.set(self.live.get() as u64);
        if !slot.set_queued(true) {
            self.ready.borrow_mut().push_back(index);
        }
        Some(TaskName::new(self.hub, index, slot.generation))
    }

    /// Has the task that is being polled polled again in the next turn, whoever wakes it before.
    pub(super) fn put_off(&self) {
        self.put_off.set(true);
    }

    /// Whether a waker is that of the task that is being polled, and not of something that it polls.
    pub(super) fn is_current(&self, waker: &Waker) -> bool {
        self.current.get().is_some_and(|name| name.waker().will_wake(waker))
    }

    /// Has a task polled in this turn, if the turn's budget allows.
    pub(super) fn make_ready(&self, name: TaskName) {
        if self.put_off.get() && self.current.get() == Some(name) {
            return;
        }
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(name.slot as usize) else { return };
        if slot.task.is_some() && name.is_generation(slot.generation) && !slot.set_queued(true) {
            self.ready.borrow_mut().push_back(name.slot);
        }
    }

    /// Has every task polled.
    pub(super) fn make_all_ready(&self) {
        for (index, slot) in self.slots.borrow_mut().iter_mut().enumerate() {
            if slot.task.is_some() && !slot.set_queued(true) {
                self.ready.borrow_mut().push_back(index as u32);
            }
        }
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.borrow().is_empty()
    }

    /// Polls the task that has waited longest; if it is put off, its waker goes to `later`. False when there is none.
    pub(super) fn poll_next(&self, later: &RefCell<Vec<Waker>>) -> bool {
        let Some(index) = self.ready.borrow_mut().pop_front() else { return false };
        let (task, name) = {
            let mut slots = self.slots.borrow_mut();
            let slot = &mut slots[index as usize];
            // Aborted, or its slot used again, since it was queued: the queue has one entry per slot in any case.
            slot.set_queued(false);
            let Some(task) = slot.task.clone() else { return true };
            (task, TaskName::new(self.hub, index, slot.generation))
        };
        let waker = name.waker();
        self.counters.task_polls.add(1);
        self.current.set(Some(name));
        let polled = task.poll(&mut Context::from_waker(&waker));
        self.current.set(None);
        if self.put_off.replace(false) {
            later.borrow_mut().push(waker);
        }
        if let Poll::Ready(end) = polled {
            drop(self.remove(name, end));
            // What nobody waits for is dropped here. Should its destructor panic, that ends nobody else: the
            // task is over, and there is no handle to tell.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(task)));
        }
        true
    }

    fn count_end(&self, end: End) {
        self.live.set(self.live.get() - 1);
        self.counters.tasks.set(self.live.get() as u64);
        self.counters.tasks_finished.add(1);
        match end {
            End::Finished => {}
            End::Aborted => self.counters.tasks_aborted.add(1),
            End::Panicked => self.counters.tasks_panicked.add(1),
        }
    }

    /// Takes a task out; it is dropped by the caller.
    pub(super) fn remove(&self, name: TaskName, end: End) -> Option<Rc<dyn AnyTask>> {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(name.slot as usize)?;
        if !name.is_generation(slot.generation) {
            return None;
        }
        let task = slot.task.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        // A slot that is still queued keeps its entry, and is polled in vain, or for its next task.
        slot.next_free = self.free.replace(name.slot) | (slot.next_free & QUEUED);
        self.count_end(end);
        Some(task)
    }

    /// Drops every task, and takes no more.
    pub(super) fn close(&self) {
        self.closed.set(true);
        // What tasks do while they are dropped may end others.
        for index in 0.. {
            let task = match self.slots.borrow_mut().get_mut(index) {
                None => break,
                Some(slot) => slot.task.take(),
            };
            if let Some(task) = task {
                // A task is never being polled here.
                self.count_end(task.cancel().unwrap_or(End::Aborted));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A task that ends when it has been polled so often.
    struct Polls(Cell<u32>);

    impl AnyTask for Polls {
        fn poll(&self, _: &mut Context<'_>) -> Poll<End> {
            self.0.set(self.0.get() - 1);
            if self.0.get() == 0 { Poll::Ready(End::Finished) } else { Poll::Pending }
        }

        fn cancel(&self) -> Option<End> {
            Some(End::Aborted)
        }
    }

    fn task(polls: u32) -> Rc<Polls> {
        Rc::new(Polls(Cell::new(polls)))
    }

    #[test]
    fn slots_are_used_again_under_another_name() {
        let table = Table::new(3, Arc::default());
        let first = table.insert(task(1)).expect("open");
        for _ in 0..10_000 {
            let name = table.insert(task(1)).expect("open");
            while table.poll_next(&RefCell::default()) {}
            table.make_ready(name);
            assert!(!table.has_ready(), "what has ended is not polled again");
        }
        assert_eq!((table.len(), table.slots.borrow().len()), (0, 2));
        let second = table.insert(task(1)).expect("open");
        assert!(first != second && table.remove(first, End::Aborted).is_none(), "the name is out of date");
        assert_eq!(table.counters.tasks_finished.get(), 10_001);
    }

    #[test]
    fn a_task_is_queued_once_however_often_it_is_woken() {
        let table = Table::new(3, Arc::default());
        let (one, other) = (table.insert(task(3)).expect("open"), table.insert(task(9)).expect("open"));
        for _ in 0..5 {
            table.make_ready(one);
            table.make_ready(other);
        }
        assert!(
            table.poll_next(&RefCell::default())
                && table.poll_next(&RefCell::default())
                && !table.poll_next(&RefCell::default())
        );
        table.make_all_ready();
        table.make_ready(one);
        assert!(
            table.poll_next(&RefCell::default())
                && table.poll_next(&RefCell::default())
                && !table.poll_next(&RefCell::default())
        );
        assert_eq!(table.counters.task_polls.get(), 4);
        // Aborted while it is queued: its place in the queue comes to nothing, or to the slot's next task.
        table.make_ready(other);
        drop(table.remove(other, End::Aborted));
        let next = table.insert(task(1)).expect("open");
        assert_eq!(next.slot, other.slot);
        assert!(table.poll_next(&RefCell::default()) && !table.poll_next(&RefCell::default()));
        assert_eq!((table.len(), table.counters.tasks_aborted.get()), (1, 1));
        table.close();
        assert_eq!((table.len(), table.counters.tasks_aborted.get()), (0, 2));
        assert!(table.insert(task(1)).is_none());
    }
}
