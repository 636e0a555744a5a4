//! Accepts, and listeners that several drivers share.

use super::*;
use std::sync::mpsc;

#[test]
fn single_accepts_tell_the_peer_and_end_when_cancelled() {
    for addr in ["127.0.0.1:0", "[::1]:0"] {
        let config = WorkerConfig { peer_addresses: true, ..config() };
        let mut driver = driver(&config);
        let Ok(listener) = TcpListener::bind(addr) else {
            println!("skipped: no {addr} here");
            return;
        };
        let addr = listener.local_addr().expect("its address");
        let mut listeners = IocpListener::share(listener, &SocketOptions::default(), 1).expect("shared");
        let listener = driver.add_listener(listeners.pop().expect("one")).expect("added");
        driver.accept(listener, AcceptMode::Once);
        let mut stream = client(addr);
        match next(&mut driver) {
            Event::Accepted { listener: of, socket, peer, mode, armed } => {
                assert_eq!((of, mode, armed), (listener, AcceptMode::Once, false));
                assert_eq!(peer, Some(stream.local_addr().expect("its address")));
                driver.discard(socket);
            }
            other => panic!("{other:?}"),
        }
        quiet(&mut driver);
        stream.read_to_end(&mut Vec::new()).expect("a discarded socket is closed");
        for _ in 0..3 {
            driver.accept(listener, AcceptMode::Once);
        }
        quiet(&mut driver);
        driver.cancel_accept(listener);
        driver.cancel_accept(listener);
        for _ in 0..3 {
            match next(&mut driver) {
                Event::AcceptFailed { error, .. } => assert_eq!(error.raw_os_error(), Some(error::CANCELLED)),
                other => panic!("{other:?}"),
            }
        }
        driver.remove_listener(listener);
        assert!(TcpStream::connect(addr).is_err(), "the listener is closed");
        // What cannot be armed is told as an event too.
        for mode in [AcceptMode::Once, AcceptMode::Multishot] {
            driver.accept(listener, mode);
            assert!(matches!(next(&mut driver), Event::AcceptFailed { mode: of, .. } if of == mode));
        }
        quiet(&mut driver);
        end(driver);
    }
}

#[test]
fn an_accepted_socket_that_nobody_took_is_closed_with_its_driver() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    driver.accept(listener, AcceptMode::Once);
    let mut stream = client(addr);
    // As when a handler panics between the two.
    assert!(matches!(next(&mut driver), Event::Accepted { .. }));
    drop(driver);
    stream.read_to_end(&mut Vec::new()).expect("closed");
}

#[test]
fn as_many_accepts_as_there_are_objects_and_no_more() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    for _ in 0..listeners::ONCE_OPS {
        driver.accept(listener, AcceptMode::Once);
    }
    driver.accept(listener, AcceptMode::Once);
    match next(&mut driver) {
        Event::AcceptFailed { error, .. } => assert_eq!(error.raw_os_error(), Some(error::NO_ROOM)),
        other => panic!("{other:?}"),
    }
    assert_eq!(driver.in_flight(), listeners::ONCE_OPS as usize);
    let streams: Vec<_> = (0..listeners::ONCE_OPS).map(|_| client(addr)).collect();
    for _ in &streams {
        match next(&mut driver) {
            // Nobody asked for it.
            Event::Accepted { socket, peer: None, .. } => driver.discard(socket),
            other => panic!("{other:?}"),
        }
    }
    end(driver);
}

/// With accepts in flight, the listener goes with the last of their packets.
#[test]
fn a_listener_that_is_removed_too_early_is_closed_when_its_accepts_have_ended() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    driver.accept(listener, AcceptMode::Once);
    driver.accept(listener, AcceptMode::Once);
    driver.remove_listener(listener);
    let _stream = client(addr);
    match next(&mut driver) {
        Event::Accepted { socket, .. } => driver.discard(socket),
        other => panic!("{other:?}"),
    }
    driver.cancel_accept(listener);
    assert!(matches!(next(&mut driver), Event::AcceptFailed { .. }));
    assert!(TcpStream::connect(addr).is_err(), "the listener is closed");
    end(driver);
}

#[test]
fn accepted_sockets_have_the_listeners_options() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let addr = listener.local_addr().expect("its address");
    let options = SocketOptions { recv_buffer: Some(20_000), ..SocketOptions::default() };
    let mut driver = driver(&config());
    let mut listeners = IocpListener::share(listener, &options, 1).expect("shared");
    let listener = driver.add_listener(listeners.pop().expect("one")).expect("added");
    let _stream = client(addr);
    let socket = accept(&mut driver, listener);
    // SAFETY: the socket is closed by nobody before the borrow ends.
    let borrowed = unsafe { std::os::windows::io::BorrowedSocket::borrow_raw(socket.handle() as _) };
    let view = socket2::SockRef::from(&borrowed);
    assert!(view.tcp_nodelay().expect("nodelay"));
    // Linux, under Wine, tells twice of what it was asked for.
    let bytes = view.recv_buffer_size().expect("a size");
    assert!((20_000..=40_000).contains(&bytes), "{bytes}");
    driver.discard(socket);
    end(driver);
}

/// The next event of any of several drivers, and whose it is.
fn next_of(drivers: &mut [IocpDriver]) -> (usize, Event) {
    let until = Instant::now() + PATIENCE;
    loop {
        for (index, driver) in drivers.iter_mut().enumerate() {
            driver.submit_and_wait(Some(Duration::from_millis(1))).expect("a wait");
            if let Some(event) = driver.next_event() {
                return (index, event);
            }
        }
        assert!(Instant::now() < until, "no event");
    }
}

#[test]
fn a_shared_listeners_accepts_come_to_whom_they_belong() {
    let (listeners, addr) = share(3);
    let mut drivers: Vec<_> = (0..3).map(|_| driver(&config())).collect();
    let ids: Vec<_> = drivers
        .iter_mut()
        .zip(listeners)
        .map(|(driver, listener)| driver.add_listener(listener).expect("added"))
        .collect();
    for (index, (driver, id)) in drivers.iter_mut().zip(&ids).enumerate() {
        for _ in 0..=index {
            driver.accept(*id, AcceptMode::Once);
        }
        assert_eq!(driver.in_flight(), index + 1);
    }
    let mut streams: Vec<_> = (0..6).map(|_| client(addr)).collect();
    let (mut accepted, mut answered) = ([0; 3], 0);
    while answered < 6 {
        let (index, event) = next_of(&mut drivers);
        match event {
            Event::Accepted { socket, .. } => {
                let key = key(accepted[index], 0);
                accepted[index] += 1;
                // Its packets come to the port of the driver that adopts it.
                drivers[index].adopt(key, socket);
                let bytes = chain(&drivers[index], &[&[index as u8]]);
                drivers[index].send(key, bytes);
            }
            Event::Sent { chain, result, .. } => {
                assert_eq!(result.expect("sent"), 1);
                drivers[index].memory().chunks.clear(chain);
                answered += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(accepted, [1, 2, 3]);
    let mut from: Vec<u8> = streams
        .iter_mut()
        .map(|stream| {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a byte");
            byte[0]
        })
        .collect();
    from.sort_unstable();
    assert_eq!(from, [0, 1, 1, 2, 2, 2]);
    drivers.into_iter().for_each(end);
    assert!(TcpStream::connect(addr).is_err(), "the listener lives on");
}

/// In whatever order the workers end, with accepts in flight, the others go on and nothing is left.
#[test]
fn sharers_end_one_after_the_other_and_the_listener_with_the_last() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let (listeners, addr) = share(3);
        let mut drivers: Vec<_> = listeners
            .into_iter()
            .map(|listener| {
                let mut driver = driver(&config());
                let id = driver.add_listener(listener).expect("added");
                for _ in 0..4 {
                    driver.accept(id, AcceptMode::Once);
                }
                Some((driver, id))
            })
            .collect();
        for (step, &index) in order.iter().enumerate() {
            let (driver, _) = drivers[index].take().expect("not ended yet");
            if step % 2 == 0 {
                assert_eq!(driver.finish(PATIENCE), 0);
            } else {
                drop(driver);
            }
            let Some((survivor, id)) = drivers.iter_mut().flatten().next() else { continue };
            // The others' accepts are as good as before: four more at each, so somebody takes this one.
            let id = *id;
            let _stream = client(addr);
            let until = Instant::now() + PATIENCE;
            let mut found = false;
            survivor.accept(id, AcceptMode::Once);
            while !found {
                assert!(Instant::now() < until, "nobody accepted");
                for (driver, _) in drivers.iter_mut().flatten() {
                    driver.submit_and_wait(Some(Duration::from_millis(1))).expect("a wait");
                    match driver.next_event() {
                        Some(Event::Accepted { socket, .. }) => {
                            driver.discard(socket);
                            found = true;
                        }
                        Some(other) => panic!("{other:?}"),
                        None => {}
                    }
                }
            }
        }
        assert!(TcpStream::connect(addr).is_err(), "the listener lives on");
    }
}

#[test]
fn workers_on_threads_of_their_own_accept_from_one_listener() {
    const WORKERS: usize = 3;
    const CLIENTS: usize = 40;
    let (listeners, addr) = share(WORKERS);
    let (tell, told) = mpsc::channel();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let workers: Vec<_> = listeners
        .into_iter()
        .map(|listener| {
            let (tell, stop) = (tell.clone(), Arc::clone(&stop));
            thread::spawn(move || {
                let mut driver = driver(&WorkerConfig { max_connections: 64, ..config() });
                let id = driver.add_listener(listener).expect("added");
                for _ in 0..4 {
                    driver.accept(id, AcceptMode::Once);
                }
                tell.send(driver.waker()).expect("the test listens");
                let (mut slot, mut open) = (0, 0);
                while !stop.load(std::sync::atomic::Ordering::Acquire) || open > 0 {
                    driver.submit_and_wait(None).expect("a wait");
                    while let Some(event) = driver.next_event() {
                        match event {
                            Event::Accepted { socket, .. } => {
                                driver.adopt(key(slot, 0), socket);
                                driver.recv(key(slot, 0));
                                (slot, open) = (slot + 1, open + 1);
                                driver.accept(id, AcceptMode::Once);
                            }
                            Event::Received { key, buf, .. } => {
                                let mut echo = Chain::EMPTY;
                                driver.memory().chunks.push(&mut echo, Payload::from(buf));
                                driver.send(key, echo);
                            }
                            Event::Sent { chain, result, .. } => {
                                result.expect("sent");
                                driver.memory().chunks.clear(chain);
                            }
                            Event::RecvEnded { key, end: RecvEnd::Eof } => driver.close(key, CloseHow::Fin),
                            Event::Closed { .. } => open -= 1,
                            Event::Woken => {}
                            other => panic!("{other:?}"),
                        }
                    }
                }
                end(driver);
                slot
            })
        })
        .collect();
    let wakers: Vec<IocpWaker> =
        (0..WORKERS).map(|_| told.recv_timeout(PATIENCE).expect("a worker")).collect();
    for number in 0..CLIENTS as u32 {
        let mut stream = client(addr);
        stream.write_all(&number.to_le_bytes()).expect("write");
        let mut room = [0; 4];
        stream.read_exact(&mut room).expect("the echo");
        assert_eq!(u32::from_le_bytes(room), number);
    }
    stop.store(true, std::sync::atomic::Ordering::Release);
    wakers.iter().for_each(Waker::wake);
    let total: u32 = workers.into_iter().map(|worker| worker.join().expect("a worker")).sum();
    assert_eq!(total, CLIENTS as u32);
    assert!(TcpStream::connect(addr).is_err(), "the listener lives on");
}
