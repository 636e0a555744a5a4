//! Time limits on the real clock: never early, and late only by what a busy machine adds.
#![cfg(target_os = "linux")]

mod support;

use std::io::Write;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use corelane::{CloseReason, Descriptors, ListenerConfig, Runtime, Time, WorkerConfig};
use support::*;

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A busy machine may be late by this much, not more.
const LATE: Duration = Duration::from_secs(5);

/// Idle timeouts count from the beginning of a millisecond.
const TICK: Duration = Duration::from_millis(1);

fn on_time(took: Duration, wanted: Duration) {
    assert!(took >= wanted, "early: {took:?} instead of {wanted:?}");
    assert!(took < wanted + LATE, "late: {took:?} instead of {wanted:?}");
}

#[test]
fn a_silent_connection_is_closed_after_the_idle_timeout_and_an_active_one_is_not() {
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let (seen, told) = channel();
        let config = WorkerConfig { descriptors, idle_timeout: Some(ms(300)), ..WorkerConfig::default() };
        let make = move |_| Hooks::telling(&seen).data(|conn, data| drop(conn.send(data)));
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, make) else { return };
        let mut active = connect(addr(&runtime));
        let active_id = opened(&told);
        let began = Instant::now();
        let mut silent = connect(addr(&runtime));
        let silent_id = opened(&told);
        // Many echoes, until the silent one is gone and twice as long.
        let mut ended = None;
        while ended.is_none_or(|ended: Duration| began.elapsed() < ended * 2) {
            exchange(&mut active, b"still here");
            if let Ok(seen) = told.try_recv() {
                assert_eq!(seen, Seen::Closed(silent_id, CloseReason::IdleTimeout));
                assert_eq!(ended.replace(began.elapsed()), None);
            }
            assert!(began.elapsed() < PATIENCE, "the silent connection is not closed");
        }
        on_time(ended.expect("set"), ms(300) - TICK);
        assert_eq!(end_of(&mut silent), (End::Fin, 0));
        assert_eq!(closed(&told), (active_id, CloseReason::IdleTimeout));
        let total = empties(&runtime);
        assert_eq!(total.closed[CloseReason::IdleTimeout.index()], 2);
        stop(runtime);
    }
}

#[test]
fn the_idle_timeout_can_be_changed_and_turned_off_per_connection() {
    let (seen, told) = channel();
    let config = WorkerConfig { idle_timeout: Some(ms(200)), ..WorkerConfig::default() };
    let Some(runtime) =
        start(Runtime::builder().worker(config).listen(any_port()), move |_| Hooks::telling(&seen))
    else {
        return;
    };
    let patient = connect(addr(&runtime));
    let never = opened(&told);
    on_conn(&runtime.remote(), never, |conn| conn.set_idle_timeout(None));
    let began = Instant::now();
    let _longer = connect(addr(&runtime));
    let longer = opened(&told);
    on_conn(&runtime.remote(), longer, |conn| conn.set_idle_timeout(Some(ms(600))));
    let _usual = connect(addr(&runtime));
    let usual = opened(&told);
    assert_eq!(next(&told), Seen::Closed(usual, CloseReason::IdleTimeout));
    assert_eq!(next(&told), Seen::Closed(longer, CloseReason::IdleTimeout));
    on_time(began.elapsed(), ms(600) - TICK);
    silent(&told, ms(300));
    drop(patient);
    stop(runtime);
}

#[test]
fn time_while_paused_does_not_count_as_idle() {
    let (seen, told) = channel();
    let config = WorkerConfig { idle_timeout: Some(ms(150)), ..WorkerConfig::default() };
    let Some(runtime) =
        start(Runtime::builder().worker(config).listen(any_port()), move |_| Hooks::telling(&seen))
    else {
        return;
    };
    let _stream = connect(addr(&runtime));
    let id = opened(&told);
    on_conn(&runtime.remote(), id, |conn| conn.pause());
    silent(&told, ms(500));
    on_conn(&runtime.remote(), id, |conn| conn.resume());
    assert_eq!(closed(&told), (id, CloseReason::IdleTimeout));
    stop(runtime);
}

/// A peer that takes what is sent to it, however slowly, is not idle; one that takes nothing is.
#[test]
fn a_congested_peer_is_idle_only_when_it_takes_nothing() {
    let (seen, told) = channel();
    let config = WorkerConfig { idle_timeout: Some(ms(400)), ..WorkerConfig::default() };
    let mut listener = ListenerConfig::new(any_port());
    listener.options.send_buffer = Some(4096);
    let make = move |_| {
        Hooks::telling(&seen).data(|conn, _| {
            // Sends go out in portions (64 pieces), whose ends are what progress is seen by.
            for _ in 0..3000 {
                conn.send(vec![1; 1000]).expect("room");
            }
        })
    };
    let Some(runtime) = start(Runtime::builder().worker(config).listen(listener), make) else { return };
    let mut slow = connect_narrow(addr(&runtime), 4096);
    slow.write_all(b"x").expect("write");
    let id = opened(&told);
    let began = Instant::now();
    let mut room = vec![0; 100_000];
    for portion in 1..=25 {
        std::io::Read::read_exact(&mut slow, &mut room).expect("not closed while it reads");
        while began.elapsed() < ms(60) * portion {
            std::thread::yield_now();
        }
    }
    assert!(began.elapsed() > ms(1200), "the test was faster than the timeout");
    // Now it reads no more, with half a megabyte on the way.
    assert_eq!(closed(&told), (id, CloseReason::IdleTimeout));
    empties(&runtime);
    stop(runtime);
}

#[test]
fn a_deadline_resets_whatever_the_connection_does() {
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let (seen, told) = channel();
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        let make = move |_| Hooks::telling(&seen).data(|conn, data| drop(conn.send(data)));
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, make) else { return };
        let remote = runtime.remote();
        let mut spared = connect(addr(&runtime));
        let spared_id = opened(&told);
        on_conn(&remote, spared_id, |conn| conn.set_deadline(Some(ms(100))));
        on_conn(&remote, spared_id, |conn| conn.set_deadline(None));
        let mut stream = connect(addr(&runtime));
        let id = opened(&told);
        let began = on_conn(&remote, id, |conn| {
            conn.set_deadline(Some(ms(300)));
            conn.now()
        });
        // It is busy to the end.
        while stream.write_all(b"x").is_ok() && std::io::Read::read(&mut stream, &mut [0]).is_ok() {
            assert!(Time::now().since(began) < PATIENCE, "no deadline");
        }
        on_time(Time::now().since(began), ms(300));
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Deadline));
        exchange(&mut spared, b"spared");
        drop(spared);
        assert_eq!(closed(&told), (spared_id, CloseReason::Eof));
        stop(runtime);
    }
}

#[test]
fn a_timer_fires_once_at_its_time_and_can_be_moved_and_taken_back() {
    let (seen, told) = channel();
    let Some(runtime) = start(Runtime::builder().listen(any_port()), move |_| Hooks::telling(&seen)) else {
        return;
    };
    let remote = runtime.remote();
    let streams: Vec<_> = (0..4).map(|_| connect(addr(&runtime))).collect();
    let ids: Vec<_> = streams.iter().map(|_| opened(&told)).collect();
    let (late, early, moved, gone) = (ids[0], ids[1], ids[2], ids[3]);
    let began = ask(&remote, 0, move |cx| {
        for (id, after) in [(late, 400), (early, 100), (moved, 50), (gone, 150)] {
            cx.conn(id).expect("open").set_timer(Some(ms(after)));
        }
        cx.conn(moved).expect("open").set_timer(Some(ms(250)));
        cx.conn(gone).expect("open").set_timer(None);
        cx.now()
    });
    for (id, after) in [(early, 100), (moved, 250), (late, 400)] {
        assert_eq!(next(&told), Seen::Timer(id));
        on_time(Time::now().since(began), ms(after));
    }
    silent(&told, ms(200));
    assert_eq!(runtime.metrics().total().timers, 3);
    sleeps(&runtime, "no timer is set");
    drop(streams);
    stop(runtime);
}

/// Thousands of timers over several levels of the wheel, in the order of their times.
#[test]
fn many_timers_fire_in_order_and_never_early() {
    let (seen, told) = channel();
    let config = WorkerConfig { max_connections: 4000, ..WorkerConfig::default() };
    let make = move |_| {
        let seen = seen.clone();
        Hooks::new(|| Time::ZERO).timer(move |conn| {
            let (now, due) = (conn.now(), *conn.state());
            seen.send((now, due)).expect("the test listens");
        })
    };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    let streams: Vec<_> = (0..1000).map(|_| connect(addr(&runtime))).collect();
    counters(&runtime, "all accepted", |total| total.connections == 1000);
    tell(&runtime.remote(), 0, |cx| {
        let ids: Vec<_> = cx.ids().collect();
        let mut rng = Rng::new(11);
        for id in ids {
            let mut conn = cx.conn(id).expect("open");
            let after = ms(rng.within(1, 700) as u64);
            *conn.state() = conn.now() + after;
            conn.set_timer(Some(after));
        }
    });
    let mut last = Time::ZERO;
    for _ in 0..1000 {
        let (now, due) = told.recv_timeout(PATIENCE).expect("a timer");
        assert!(now >= due, "early: {now} instead of {due}");
        assert!(now.since(due) < LATE, "late: {now} instead of {due}");
        assert!(now >= last);
        // Two that fire in one turn may come in any order; those of different turns may not.
        last = now;
    }
    drop(streams);
    empties(&runtime);
    stop(runtime);
}

#[test]
fn the_alarm_is_exact_to_more_than_the_wheels_millisecond() {
    let (rang, told) = channel();
    let make = move |_| {
        let rang = rang.clone();
        let mut due = Vec::new();
        Hooks::plain().start(|cx| cx.set_alarm(cx.now() + ms(20))).alarm(move |cx| {
            due.push(cx.now());
            if due.len() < 50 {
                cx.set_alarm(cx.now() + Duration::from_micros(1300));
            } else {
                rang.send(due.clone()).expect("the test listens");
            }
        })
    };
    let Some(runtime) = start(Runtime::builder(), make) else { return };
    let rang = told.recv_timeout(PATIENCE).expect("fifty alarms");
    let mut between: Vec<_> = rang.windows(2).map(|pair| pair[1].since(pair[0])).collect();
    assert!(between.iter().all(|&gap| gap >= Duration::from_micros(1300)), "early: {between:?}");
    between.sort_unstable();
    // Not rounded up to whole milliseconds; the least of them, since the machine has other work too.
    assert!(between[0] < Duration::from_micros(1900), "{between:?}");
    sleeps(&runtime, "after the last alarm");
    stop(runtime);
}

#[test]
fn an_alarm_can_be_moved_and_taken_back() {
    let (rang, told) = channel();
    let make = move |_| {
        let rang = rang.clone();
        Hooks::plain().alarm(move |cx| rang.send(cx.now()).expect("the test listens"))
    };
    let Some(runtime) = start(Runtime::builder(), make) else { return };
    let remote = runtime.remote();
    tell(&remote, 0, |cx| {
        cx.set_alarm(cx.now() + ms(50));
        cx.clear_alarm();
    });
    assert!(told.recv_timeout(ms(150)).is_err(), "it was taken back");
    let due = ask(&remote, 0, |cx| {
        cx.set_alarm(cx.now() + ms(10));
        let due = cx.now() + ms(200);
        cx.set_alarm(due);
        due
    });
    let rang = told.recv_timeout(PATIENCE).expect("the alarm");
    assert!(rang >= due && rang.since(due) < LATE, "{rang} instead of {due}");
    assert!(told.recv_timeout(ms(100)).is_err(), "it rang once");
    stop(runtime);
}
