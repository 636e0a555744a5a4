//! A kernel that is stopped from touching memory: reported, and in guard mode the end of the process. The
//! mistakes that lead there are made on purpose, behind the driver's back.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use super::*;

/// Set in the environment of a child to what it is to do wrong.
const SIN: &str = "CORELANE_TEST_SIN";

fn guarded() -> WorkerConfig {
    let buffers = BufferConfig { size: 1024, count: 8, guard: true, ..BufferConfig::default() };
    WorkerConfig { buffers, ..config(Descriptors::Direct) }
}

/// Receive buffers are taken back, and used, while the kernel may still fill them.
fn take_back_too_early(driver: &mut UringDriver) {
    let (key, mut stream) = pair(driver, 0);
    driver.recv(key);
    quiet(driver);
    let pool = driver.memory().pool.clone();
    pool.take_all_back();
    let _used: Vec<_> = std::iter::from_fn(|| pool.lease_with(|room| room.len())).collect();
    stream.write_all(b"too late").expect("write");
    let event = next(driver);
    panic!("{event:?} from a buffer that was taken back");
}

/// A lease is dropped while the kernel still sends from it.
fn drop_too_early(driver: &mut UringDriver) {
    let (key, mut stream) = pair(driver, 0);
    let mut reply = driver.memory().pool.alloc().expect("a send buffer");
    reply.put(b"to be sent");
    let buf = reply.freeze();
    // SAFETY: a second owner of one lease, which must never be: that is the mistake.
    let stolen = unsafe { std::ptr::read(&raw const buf) };
    let mut rest = chain(driver, &[&vec![1; 8 << 20]]);
    driver.memory().chunks.push(&mut rest, Payload::from(buf));
    driver.send(key, rest);
    quiet(driver);
    drop(stolen);
    thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
    // The kernel says how far it came, and then, asked to go on, that it cannot.
    loop {
        match next(driver) {
            Event::Sent { chain: mut rest, result, .. } => {
                driver.memory().chunks.consume(&mut rest, result.expect("a part was sent"));
                assert!(!rest.is_empty(), "sent from a buffer that was given back");
                driver.send(key, rest);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn in_guard_mode_a_kernel_that_comes_too_late_ends_the_process_and_says_why() {
    const NAME: &str = "driver::uring::tests::guard::\
                        in_guard_mode_a_kernel_that_comes_too_late_ends_the_process_and_says_why";
    let Some(mut driver) = driver(&guarded()) else { return };
    match std::env::var(SIN).ok().as_deref() {
        Some("receive") => take_back_too_early(&mut driver),
        Some("send") => drop_too_early(&mut driver),
        other => assert_eq!(other, None),
    }
    end(driver);
    for (sin, what) in [("receive", "Recv"), ("send", "Send")] {
        let mut child = Command::new(std::env::current_exe().expect("the path of this program"));
        child.args(["--exact", NAME, "--nocapture", "--test-threads=1"]).env(SIN, sin);
        let output = child.stdin(Stdio::null()).output().expect("a child");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{sin}: {said}");
        for word in ["corelane: guard mode", what, "EFAULT"] {
            assert!(said.contains(word), "{sin}: {word} is missing in {said}");
        }
    }
}

/// Without guard mode the process goes on, but the mistake is counted and the connection fails.
#[test]
fn a_fault_is_counted_and_fails_its_connection() {
    let buffers = BufferConfig { size: 4096, count: 1, send_count: 0, guard: false };
    let Some(mut driver) = driver(&WorkerConfig { buffers, ..config(Descriptors::Direct) }) else { return };
    if driver.memory().pool.is_guarded() {
        println!("skipped: guard mode is on for everything, and would end this process");
        return;
    }
    let (key, mut stream) = pair(&mut driver, 0);
    driver.recv(key);
    quiet(&mut driver);
    let protect = |driver: &UringDriver, how| {
        let page = driver.memory().pool.address(0).as_ptr();
        // SAFETY: a page of the arena, which nobody but the kernel has now.
        let result = unsafe { libc::mprotect(page.cast(), 4096, how) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    };
    protect(&driver, libc::PROT_NONE);
    stream.write_all(b"nowhere to put it").expect("write");
    match recv_ended(&mut driver, key) {
        RecvEnd::Failed(error) => assert_eq!(error.raw_os_error(), Some(libc::EFAULT)),
        other => panic!("{other:?}"),
    }
    assert_eq!(driver.counters.faults.get(), 1);
    protect(&driver, libc::PROT_READ | libc::PROT_WRITE);
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

/// What a kernel could still be told of by a mistake after the end is out of its reach then.
#[test]
fn a_driver_that_ends_leaves_no_buffer_lent() {
    let Some(mut driver) = driver(&guarded()) else { return };
    let (key, mut stream) = pair(&mut driver, 0);
    driver.recv(key);
    stream.write_all(b"kept").expect("write");
    let (buf, _) = received(&mut driver, key);
    let pool = driver.memory().pool.clone();
    assert_eq!(driver.finish(PATIENCE), 0);
    let mut free = Vec::new();
    pool.lend_all(|index| {
        free.push(index);
        true
    });
    assert_eq!(free.len(), 7, "all but the one that is leased: {free:?}");
    assert_eq!(&buf[..], b"kept");
}
