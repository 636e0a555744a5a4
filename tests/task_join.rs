//! What a `JoinHandle` promises: aborts in every state, panics as errors, drops that detach.

use std::cell::{Cell, RefCell};
use std::future::{Future, pending};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use corelane::task::{self, JoinHandle, block_on, spawn, yield_now};
use futures::StreamExt;
use futures::stream::FuturesUnordered;

/// Counts its drops.
#[derive(Clone, Default)]
struct Drops(Rc<Cell<u32>>);

struct Dropped(Drops);

impl Drops {
    fn one(&self) -> Dropped {
        Dropped(self.clone())
    }

    fn seen(&self) -> u32 {
        self.0.get()
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.0.set(self.0.0.get() + 1);
    }
}

#[test]
fn an_abort_drops_an_idle_task_at_once() {
    block_on(async {
        let drops = Drops::default();
        let inside = drops.one();
        let handle: JoinHandle<()> = spawn(async move {
            let _inside = inside;
            pending().await
        });
        yield_now().await;
        assert_eq!(drops.seen(), 0, "it waits");
        handle.abort();
        assert_eq!(drops.seen(), 1);
        assert!(handle.is_finished());
        handle.abort();
        let error = handle.await.expect_err("aborted");
        assert!(error.is_aborted() && !error.is_panic());
        assert_eq!(error.to_string(), "the task was aborted");
        assert!(error.try_into_panic().is_err());
    })
    .expect("it runs");
}

#[test]
fn an_abort_drops_a_queued_task_that_then_never_runs_and_its_place_serves_the_next() {
    block_on(async {
        let drops = Drops::default();
        let inside = drops.one();
        let handle = spawn(async move {
            drop(inside);
            unreachable!("it was aborted before it ran")
        });
        handle.abort();
        assert_eq!(drops.seen(), 1);
        let next = spawn(async { 5 });
        assert_eq!(next.await.expect("it has the slot of the other"), 5);
        let outcome: Result<(), _> = handle.await;
        assert!(outcome.expect_err("aborted").is_aborted());
    })
    .expect("it runs");
}

#[test]
fn a_task_that_aborts_itself_ends_when_it_waits() {
    block_on(async {
        let own: Rc<RefCell<Option<JoinHandle<u32>>>> = Rc::default();
        let reached = Rc::new(Cell::new(0));
        let (inside, steps) = (own.clone(), reached.clone());
        let handle = spawn(async move {
            inside.borrow().as_ref().expect("it was put there").abort();
            steps.set(1);
            yield_now().await;
            steps.set(2);
            7
        });
        *own.borrow_mut() = Some(handle);
        while !own.borrow().as_ref().expect("there").is_finished() {
            yield_now().await;
        }
        assert_eq!(reached.get(), 1);
        let handle = own.borrow_mut().take().expect("there");
        assert!(handle.await.expect_err("aborted").is_aborted());
    })
    .expect("it runs");
}

#[test]
fn an_abort_of_a_finished_task_changes_nothing() {
    block_on(async {
        let handle = spawn(async { "done" });
        while !handle.is_finished() {
            yield_now().await;
        }
        handle.abort();
        assert_eq!(handle.await.expect("it had finished"), "done");
    })
    .expect("it runs");
}

#[test]
fn a_panic_is_the_tasks_own_and_its_text_is_in_the_error() {
    block_on(async {
        let error = spawn(async { std::panic::panic_any(String::from("number 7")) })
            .await
            .map(|_: ()| ())
            .expect_err("it panicked");
        assert!(error.is_panic());
        assert_eq!(error.to_string(), "the task panicked: number 7");
        let panic = error.try_into_panic().expect("what it panicked with");
        assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("number 7"));
        assert_eq!(spawn(async { 1 }).await.expect("the others go on"), 1);
    })
    .expect("it runs");
}

struct PanicsWhenDropped(&'static str);

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("{}", self.0);
    }
}

#[test]
fn a_panic_while_a_future_is_dropped_is_the_tasks_own() {
    block_on(async {
        let handle: JoinHandle<()> = spawn(async {
            let _bomb = PanicsWhenDropped("dropped by an abort");
            pending().await
        });
        yield_now().await;
        handle.abort();
        let error = handle.await.expect_err("it panicked");
        assert_eq!(error.to_string(), "the task panicked: dropped by an abort");

        // One that is dropped after its last poll.
        struct Owner {
            _bomb: PanicsWhenDropped,
        }
        impl Future for Owner {
            type Output = u8;
            fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<u8> {
                Poll::Ready(1)
            }
        }
        let error =
            spawn(Owner { _bomb: PanicsWhenDropped("dropped at its end") }).await.expect_err("it panicked");
        assert_eq!(error.to_string(), "the task panicked: dropped at its end");

        // An outcome that nobody waits for.
        drop(spawn(async { PanicsWhenDropped("an outcome") }));
        yield_now().await;
        assert_eq!(spawn(async { 1 }).await.expect("the worker goes on"), 1);
    })
    .expect("it runs");
}

#[test]
fn a_dropped_handle_lets_its_task_go_on() {
    block_on(async {
        let done = Rc::new(Cell::new(false));
        let inside = done.clone();
        drop(spawn(async move {
            for _ in 0..10 {
                yield_now().await;
            }
            inside.set(true);
        }));
        while !done.get() {
            yield_now().await;
        }
    })
    .expect("it runs");
}

/// Spawns when it is dropped.
struct SpawnsWhenDropped(Drops, u32);

impl Drop for SpawnsWhenDropped {
    fn drop(&mut self) {
        if self.1 > 0 {
            let next = SpawnsWhenDropped(self.0.clone(), self.1 - 1);
            let handle = spawn(async move {
                let _next = next;
                pending::<()>().await
            });
            assert!(handle.is_finished(), "a worker that ends takes no tasks");
        }
        self.0.0.set(self.0.0.get() + 1);
    }
}

#[test]
fn what_is_spawned_while_the_worker_ends_is_dropped_at_once() {
    let drops = Drops::default();
    let inside = drops.clone();
    block_on(async move {
        drop(spawn(async move {
            let _it = SpawnsWhenDropped(inside, 3);
            pending::<()>().await
        }));
        yield_now().await;
    })
    .expect("it runs");
    assert_eq!(drops.seen(), 4);
}

#[test]
fn handles_that_outlive_their_worker_tell_of_an_abort() {
    let handle = block_on(async {
        let handle: JoinHandle<u8> = spawn(pending());
        (handle,)
    });
    let (handle,) = handle.expect("it runs");
    assert!(handle.is_finished());
    handle.abort();
    assert!(block_on(handle).expect("it runs").expect_err("dropped with its worker").is_aborted());
}

#[test]
fn many_handles_are_joined_in_the_order_in_which_their_tasks_end() {
    block_on(async {
        let mut set: FuturesUnordered<_> = (0..200u32)
            .map(|number| {
                spawn(async move {
                    for _ in 0..(200 - number) / 10 {
                        yield_now().await;
                    }
                    assert!(number != 77, "one of them panics");
                    number
                })
            })
            .collect();
        let (mut ended, mut panicked) = (Vec::new(), 0);
        while let Some(outcome) = set.next().await {
            match outcome {
                Ok(number) => ended.push(number),
                Err(error) => panicked += u32::from(error.is_panic()),
            }
        }
        assert_eq!((ended.len(), panicked), (199, 1));
        assert!(ended[0] >= 190 && ended[198] < 10, "{ended:?}");
    })
    .expect("it runs");
}

#[test]
fn tasks_are_counted_by_how_they_ended() {
    let runtime = corelane::Runtime::builder()
        .start_tasks(|_| async {
            assert_eq!(spawn(async { 1 }).await.expect("finished"), 1);
            spawn(async { panic!("on purpose") }).await.map(|_: ()| ()).expect_err("panicked");
            let idle = spawn(pending::<()>());
            yield_now().await;
            idle.abort();
            for _ in 0..3 {
                drop(spawn(pending::<()>()));
            }
            task::stopped().await;
        })
        .expect("it starts");
    let report = runtime.shutdown(std::time::Duration::from_secs(5)).expect("it ends well");
    let total = report.metrics.total();
    assert_eq!((total.tasks_spawned, total.tasks_finished, total.tasks), (7, 7, 0), "{total:?}");
    assert_eq!((total.tasks_panicked, total.tasks_aborted), (1, 4), "{total:?}");
    assert!(total.task_polls >= 8, "{total:?}");
    assert_eq!(report.tasks_dropped, 3);
    assert!(report.to_string().ends_with(", 3 tasks dropped"), "{report}");
}

#[test]
fn a_join_error_goes_where_errors_go() {
    fn goes<T: Send + Sync + std::error::Error + 'static>(_: &T) {}
    let failed: std::io::Result<()> = block_on(async {
        let task: JoinHandle<()> = spawn(async { panic!("on purpose") });
        task.await.inspect_err(goes).map_err(std::io::Error::other)
    })
    .expect("it runs");
    assert_eq!(failed.expect_err("it panicked").to_string(), "the task panicked: on purpose");
}
