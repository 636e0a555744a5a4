//! Promise 8: no callback of one connection runs on two threads, and order on a connection is kept.
#![cfg(target_os = "linux")]

mod support;

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use corelane::{ConnId, Runtime, WorkerConfig};
use support::*;

/// What is known of one connection: the thread of its first callback, and what has come so far.
struct Life {
    thread: ThreadId,
    worker: usize,
    next: u32,
    half: Vec<u8>,
}

impl Life {
    fn check(&self) {
        assert_eq!(thread::current().id(), self.thread, "a callback on another thread");
    }
}

#[test]
fn every_callback_of_a_connection_runs_on_its_workers_thread_and_in_order() {
    const CLIENTS: usize = 60;
    const NUMBERS: u32 = 2000;
    let threads: Arc<Mutex<HashMap<usize, ThreadId>>> = Arc::default();
    let by_worker = threads.clone();
    let ended = Arc::new(AtomicU64::new(0));
    let ending = ended.clone();
    let make = move |worker| {
        let ended = ending.clone();
        let thread = thread::current().id();
        assert_eq!(by_worker.lock().expect("no panic").insert(worker, thread), None);
        Hooks::new(move || Life { thread, worker, next: 0, half: Vec::new() })
            .start(move |cx| assert_eq!((cx.worker(), thread::current().id()), (worker, thread)))
            .data(|conn, data| {
                assert_eq!(conn.cx().worker(), conn.state().worker);
                let life = conn.state();
                life.check();
                life.half.extend_from_slice(&data);
                let whole = life.half.len() / 4 * 4;
                for number in life.half.drain(..whole).collect::<Vec<_>>().chunks(4) {
                    let number = u32::from_le_bytes(number.try_into().expect("four bytes"));
                    assert_eq!(number, life.next, "out of order");
                    life.next += 1;
                }
                conn.set_timer(Some(std::time::Duration::from_millis(1)));
                conn.send(data).expect("room");
            })
            .timer(|conn| conn.state().check())
            .writable(|conn| conn.state().check())
            .eof(|conn| {
                conn.state().check();
                conn.close();
            })
            .closed(move |cx, end| {
                end.state.check();
                assert_eq!((cx.worker(), end.id.worker()), (end.state.worker, end.state.worker));
                assert_eq!(end.state.next, NUMBERS, "not everything came");
                ended.fetch_add(1, Ordering::Relaxed);
            })
    };
    let builder = Runtime::builder().workers(3).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    let addr = addr(&runtime);
    let numbers: Vec<u8> = (0..NUMBERS).flat_map(u32::to_le_bytes).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Meanwhile another thread has every worker look at all of its connections.
        let looking = scope.spawn(|| {
            let remote = runtime.remote();
            while !over.load(Ordering::Relaxed) {
                for worker in 0..3 {
                    ask(&remote, worker, |cx| {
                        let ids: Vec<ConnId> = cx.ids().collect();
                        ids.into_iter().for_each(|id| cx.conn(id).expect("open").state().check());
                    });
                }
            }
        });
        let clients: Vec<_> = (0..3)
            .map(|client| {
                let numbers = &numbers;
                scope.spawn(move || {
                    let mut rng = Rng::new(client);
                    let mut streams: Vec<_> = (0..CLIENTS / 3).map(|_| (connect(addr), 0, 0)).collect();
                    while !streams.is_empty() {
                        let index = rng.within(0, streams.len() - 1);
                        let (stream, sent, got) = &mut streams[index];
                        let to = (*sent + rng.within(1, 400)).min(numbers.len());
                        stream.write_all(&numbers[*sent..to]).expect("write");
                        *sent = to;
                        if rng.one_in(2) || to == numbers.len() {
                            expect(&*stream, &numbers[*got..to]);
                            *got = to;
                        }
                        if *got == numbers.len() {
                            streams.swap_remove(index);
                        }
                    }
                })
            })
            .collect();
        for client in clients {
            client.join().expect("a client");
        }
        over.store(true, Ordering::Relaxed);
        looking.join().expect("the onlooker");
    });
    empties(&runtime);
    assert_eq!(ended.load(Ordering::Relaxed), CLIENTS as u64);
    let threads: std::collections::HashSet<_> = threads.lock().expect("no panic").values().copied().collect();
    assert_eq!(threads.len(), 3, "a thread for each worker");
    stop(runtime);
}

/// Two workers on one processor each, as asked for.
#[test]
fn a_pinned_worker_runs_on_its_processor_only() {
    let cpus = thread::available_parallelism().map_or(1, usize::from).min(2);
    let builder = Runtime::builder()
        .workers(2)
        .cpus((0..cpus).collect())
        .worker(WorkerConfig::default())
        .name("pinned");
    let Some(runtime) = start(builder, |_| Hooks::plain()) else { return };
    for worker in 0..2 {
        let (cpu, name) = ask(&runtime.remote(), worker, |_| {
            // SAFETY: takes no pointer.
            let cpu = unsafe { libc::sched_getcpu() };
            (cpu, thread::current().name().map(str::to_owned))
        });
        assert_eq!(usize::try_from(cpu).expect("a processor"), worker % cpus);
        assert_eq!(runtime.info().workers[worker].cpu, Some(worker % cpus));
        assert_eq!(name, Some(format!("pinned-{worker}")));
    }
    stop(runtime);
}
