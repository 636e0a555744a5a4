//! What the futures of one worker share: its tasks, its timers, and, while they run, the worker's core.
//!
//! The worker owns its core. For as long as tasks are polled the core is *here*: [`TaskHandler`] exchanges
//! the worker's box with a stand-in that knows no connection, and exchanges them again when it is through, also when a
//! panic takes it there. So a future reaches connections without asking anybody and without `unsafe`,
//! and one that is dropped when no tasks run (because the worker has ended) finds the stand-in and
//! does nothing.
//!
//! [`TaskHandler`]: super::run::TaskHandler

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::clock::Time;
use crate::handler::{CloseReason, ConnId, Cx};
use crate::metrics::Counters;
use crate::sync::{Groups, ShutdownToken};
use crate::worker::{Answer, Core, Remote, Request};

use super::accept::{Accepting, Listeners};
use super::blocking::{Part, Pool};
use super::datagrams::{Datagrams, Sends};
use super::link::Link;
use super::message::Message;
use super::question::Reply;
use super::queue::Queue;
use super::run::TaskHandler;
use super::spawner::Spawner;
use super::table::Table;
use super::timers::Timers;
use super::waker::{Current, Reach, Registration, make_current, with_current};

/// The core of a worker that runs tasks.
pub(crate) type TaskCore = Core<Rc<Link>, Message>;

/// Operations that a task may find done at once before it must let the others go on.
const TASK_BUDGET: u32 = 128;

pub(crate) struct Hub {
    registration: Registration,
    reach: Arc<Reach>,
    core: RefCell<Box<TaskCore>>,
    pub(super) tasks: Table,
    pub(super) timers: Timers,
    pub(super) listeners: Listeners,
    pub(super) datagrams: Datagrams,
    /// Who waits for room for a connection.
    pub(crate) vacancies: Queue,
    /// Who waits for a send buffer.
    pub(crate) buffers: Queue,
    /// Whom callbacks want woken; done when tasks run.
    pub(super) woken: RefCell<Vec<Waker>>,
    /// Calls on other threads.
    pub(super) blocking: Part,
    /// Whose turn it is when a task is to run anywhere.
    pub(super) spawner: Spawner,
    pub(super) counters: Arc<Counters>,
    budget: Cell<u32>,
    now: Cell<Time>,
    pub(super) stopping: Cell<bool>,
    /// Cancelled when the stop begins.
    stop: ShutdownToken,
    /// Cancelled at its deadline.
    over: ShutdownToken,
    groups: Groups,
}

impl Hub {
    pub(super) fn new(cx: &Cx<'_, TaskHandler>, pool: &Pool) -> Rc<Self> {
        let (worker, remote) = (cx.worker(), cx.remote());
        let counters = cx.core.counters.clone();
        let spawner = Spawner::new(remote.clone(), worker + 1);
        let reach = Arc::new(Reach { worker, remote });
        let registration = Registration::new(reach.clone());
        let now = cx.now();
        Rc::new(Self {
            core: RefCell::new(Box::new(cx.core.stand_in())),
            tasks: Table::new(registration.number, counters.clone()),
            registration,
            blocking: pool.part(reach.clone()),
            reach,
            spawner,
            counters,
            timers: Timers::new(now),
            listeners: Listeners::default(),
            datagrams: Datagrams::default(),
            vacancies: Queue::default(),
            buffers: Queue::default(),
            woken: RefCell::default(),
            budget: Cell::new(TASK_BUDGET),
            now: Cell::new(now),
            stopping: Cell::new(false),
            stop: ShutdownToken::new(),
            over: ShutdownToken::new(),
            groups: Groups::default(),
        })
    }

    /// The hub whose task is running.
    ///
    /// # Panics
    /// Outside of a task.
    pub(crate) fn current() -> Rc<Self> {
        with_current(|hub| hub.cloned()).expect(
            "this belongs inside a corelane task: run it with corelane::task::block_on or Builder::start_tasks",
        )
    }

    /// Its number among the process's.
    pub(super) fn number(&self) -> u32 {
        self.registration.number
    }

    /// Index of the worker in its runtime.
    pub(crate) fn worker(&self) -> usize {
        self.reach.worker
    }

    /// Reaches all workers of the runtime.
    pub(crate) fn remote(&self) -> &Remote<Message> {
        &self.reach.remote
    }

    /// The time of this turn.
    pub(crate) fn now(&self) -> Time {
        self.now.get()
    }

    /// Acts on the worker's core. Nothing that is called inside may run a user's code.
    #[inline]
    pub(crate) fn with_core<R>(&self, act: impl FnOnce(&mut TaskCore) -> R) -> R {
        act(&mut self.core.borrow_mut())
    }

    /// Whether the runtime was asked to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Takes one of the operations that a task may find done at once. When there is none left the task is put
    /// off until the next turn, so that one that never has to wait cannot keep the others from running.
    #[inline]
    pub(crate) fn poll_budget(&self, cx: &Context<'_>) -> Poll<()> {
        let left = self.budget.get();
        if left == 0 {
            self.tasks.put_off();
            // A combinator polls again only what was woken, and gives way when what it polls wakes itself.
            if !self.tasks.is_current(cx.waker()) {
                cx.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
        self.budget.set(left - 1);
        Poll::Ready(())
    }

    /// Has a task polled in the next turn, after what happens until then.
    pub(crate) fn wake_next_turn(&self, cx: &Context<'_>) {
        self.woken.borrow_mut().push(cx.waker().clone());
    }

    /// Sets a timer.
    pub(crate) fn set_timer(&self, due: Time, waker: Waker) -> u32 {
        self.timers.set(due, waker)
    }

    /// Changes whom a timer wakes.
    pub(crate) fn update_timer(&self, entry: u32, due: Time, waker: &Waker) {
        self.timers.update(entry, due, waker);
    }

    /// Takes a timer back.
    pub(crate) fn cancel_timer(&self, entry: u32) {
        self.timers.cancel(entry);
    }

    /// Asks the worker for something; see [`Request`].
    pub(crate) fn request(&self, request: Request) {
        self.with_core(|core| core.requests.push(request));
    }

    /// The listener of that number among the worker's, if nobody has taken it yet.
    pub(crate) fn take_listener(&self, index: usize) -> Option<Rc<Accepting>> {
        self.listeners.take(index)
    }

    /// Is cancelled when the runtime is asked to stop.
    pub(crate) fn stop_token(&self) -> &ShutdownToken {
        &self.stop
    }

    /// Is cancelled when the deadline of the stop has passed and what is left is reset.
    pub(crate) fn over_token(&self) -> &ShutdownToken {
        &self.over
    }

    /// Ends a connection's receiving as a stop of the runtime does.
    pub(crate) fn end_receiving(&self, id: ConnId) {
        if let Some(link) = self.link(id) {
            link.is_ending.set(true);
            if link.is_to_end(false) {
                self.woken.borrow_mut().extend(link.reader.take());
            }
        }
    }

    /// Members of broadcasts.
    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Takes note of a datagram socket's sends.
    pub(crate) fn add_datagrams(&self, sends: Rc<Sends>) {
        self.datagrams.add(sends);
    }

    fn link(&self, id: ConnId) -> Option<Rc<Link>> {
        self.with_core(|core| core.find(id).map(|slot| core.state(slot).clone()))
    }

    /// Hands what the driver said to whom it is for.
    fn take_answers(&self) {
        while let Some(answer) = self.with_core(|core| core.answers.pop_front()) {
            match answer {
                Answer::Listening { ticket, result } => self.listeners.bound(self, ticket, result),
                Answer::Addresses { id, result } => {
                    self.tell(id, |link| link.rare().questions.answer(Reply::Addresses(Box::new(result))));
                }
                Answer::Options { id, result } => {
                    self.tell(id, |link| link.rare().questions.answer(Reply::Options(result)));
                }
                Answer::Fault { id, error } => self.tell(id, |link| {
                    link.rare().fault.set(Some(error));
                    link.reader.take()
                }),
                Answer::DatagramSent { id, token, result } => self.datagrams.done(id, token, result),
            }
        }
    }

    /// Tells a connection that is not over, and wakes whom that concerns.
    fn tell(&self, id: ConnId, tell: impl FnOnce(&Link) -> Option<Waker>) {
        if let Some(waker) = self.link(id).and_then(|link| tell(&link)) {
            waker.wake();
        }
    }

    /// Whether wakes from other threads found no place.
    pub(super) fn is_told_to_poll_all(&self) -> bool {
        self.reach.remote.mailbox(self.worker()).is_overrun()
    }

    /// Whether there is anything to do before something happens. To be asked while the worker has its core.
    pub(super) fn has_work(&self) -> bool {
        self.tasks.has_ready() || !self.woken.borrow().is_empty()
    }

    /// Calls those who wait for what there is now.
    pub(super) fn call_waiting(&self, core: &TaskCore) {
        if !self.vacancies.is_empty() && core.table.room() > 0 {
            self.vacancies.call(core.table.room() as usize, &mut self.woken.borrow_mut());
        }
        if !self.buffers.is_empty() && core.memory.pool.sendable() > 0 {
            self.buffers.call(core.memory.pool.sendable() as usize, &mut self.woken.borrow_mut());
        }
    }

    fn wake_all(&self, wakers: &RefCell<Vec<Waker>>) {
        // Waking may note more; the list keeps its memory.
        let mut list = std::mem::take(&mut *wakers.borrow_mut());
        for waker in list.drain(..) {
            waker.wake();
        }
        let mut now = wakers.borrow_mut();
        if now.is_empty() {
            *now = list;
        }
    }

    /// One turn of the tasks: wakes who is to be woken, then polls, `budget` polls at most.
    pub(super) fn turn(self: &Rc<Self>, budget: u32) {
        self.take_answers();
        self.timers.advance(self.now.get(), &self.woken);
        self.wake_all(&self.woken);
        if self.is_told_to_poll_all() && self.reach.remote.mailbox(self.worker()).take_overrun() {
            self.counters.remote_wakes.add(1);
            self.tasks.make_all_ready();
        }
        for _ in 0..budget {
            self.budget.set(TASK_BUDGET);
            if !self.tasks.poll_next(&self.woken) {
                break;
            }
        }
    }

    /// Takes note of a stop: who accepts is told, and who receives from a client that has nothing under way.
    pub(super) fn stop(&self) {
        self.stopping.set(true);
        self.stop.cancel();
        self.listeners.wake_all();
        let untaken = self.listeners.take_pending();
        self.with_core(|core| {
            for link in untaken {
                if let Some(slot) = core.find(link.id.get()) {
                    core.close(slot, CloseReason::Shutdown);
                }
            }
            for slot in 0..core.table.used() {
                let Some(link) = &core.table.get(slot).state else { continue };
                if link.ends_on_stop.get() {
                    self.woken.borrow_mut().extend(link.reader.take());
                }
            }
        });
    }

    /// Runs `run` with the worker's core here, as the current hub.
    pub(super) fn enter<R>(
        self: &Rc<Self>,
        cx: &mut Cx<'_, TaskHandler>,
        run: impl FnOnce(&Rc<Self>) -> R,
    ) -> R {
        self.now.set(cx.now());
        let _current = make_current(self.clone());
        let _core = Lent::new(self, cx.core);
        run(self)
    }

    /// Drops every task. To be called without the worker's core.
    pub(super) fn close(self: &Rc<Self>) {
        let _current: Current = make_current(self.clone());
        self.tasks.close();
        self.listeners.close();
        self.datagrams.close();
        drop(std::mem::take(&mut *self.woken.borrow_mut()));
    }
}

/// The worker's core lent to the hub, and given back by dropping this.
struct Lent<'a> {
    hub: &'a Hub,
    place: &'a mut Box<TaskCore>,
}

impl<'a> Lent<'a> {
    fn new(hub: &'a Hub, place: &'a mut Box<TaskCore>) -> Self {
        std::mem::swap(place, &mut *hub.core.borrow_mut());
        Self { hub, place }
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        std::mem::swap(self.place, &mut *self.hub.core.borrow_mut());
    }
}
