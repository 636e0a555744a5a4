//! What the tests of the command-line tool share: children that cannot outlive their test, and
//! waits that cannot last.

// Each test program uses its own part of this.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// No child may take longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a child left behind.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A running child.
pub struct Process {
    child: Child,
    pub stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    said: Receiver<String>,
}

impl Process {
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = child.stdout.take().expect("piped");
        let stderr = child.stderr.take().expect("piped");
        Self { stdin: child.stdin.take(), child, lines: lines(stdout), said: lines(stderr) }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line on standard output.
    pub fn line(&mut self) -> String {
        self.lines.recv_timeout(PATIENCE).unwrap_or_else(|error| {
            let _ = self.child.kill();
            panic!("no line ({error}); stderr: {}", rest(&self.said))
        })
    }

    /// The next line on standard error that contains `text`.
    pub fn said(&mut self, text: &str) -> String {
        loop {
            match self.said.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(text) => return line,
                Ok(_) => {}
                Err(error) => panic!("never said '{text}' ({error})"),
            }
        }
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits until it ends by itself.
    pub fn end(mut self) -> Ended {
        let (stderr, stdout) = (rest(&self.said), rest(&self.lines));
        // Both streams have ended, or were waited for long enough.
        let code = match self.child.try_wait() {
            Ok(Some(status)) => status.code(),
            _ if stderr.ends_with(GIVEN_UP) => None,
            _ => self.child.wait().expect("ended").code(),
        };
        Ended { code, stdout, stderr }
    }
}

/// Marks text that was not waited for to its end.
const GIVEN_UP: &str = "(gave up waiting)";

/// All further lines.
fn rest(lines: &Receiver<String>) -> String {
    let mut text = String::new();
    loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                text.push_str(&line);
                text.push('\n');
            }
            Err(RecvTimeoutError::Disconnected) => return text,
            Err(RecvTimeoutError::Timeout) => return text + GIVEN_UP,
        }
    }
}

/// Lines of a stream, as they come.
fn lines(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    thread::spawn(move || {
        for text in BufReader::new(stream).lines().map_while(Result::ok) {
            let _ = sender.send(text);
        }
    });
    lines
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The tool with these arguments.
pub fn corelane(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corelane"));
    command.args(args);
    command
}

/// Runs the tool to its end.
pub fn run(args: &[&str]) -> Ended {
    Process::spawn(&mut corelane(args)).end()
}

/// A server of the tool on a port of the system's choice.
pub struct Server {
    pub process: Process,
    pub addr: SocketAddr,
}

impl Server {
    pub fn start(args: &[&str]) -> Self {
        let mut command = corelane(&["serve"]);
        command.args(args);
        if !args.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let mut process = Process::spawn(&mut command);
        let line = process.line();
        let addr = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("'{line}'"));
        let addr = addr.parse().unwrap_or_else(|_| panic!("'{line}'"));
        Self { process, addr }
    }

    pub fn connect(&self) -> TcpStream {
        connect(self.addr)
    }

    /// Asks it to stop, and waits.
    pub fn stop(self) -> Ended {
        self.process.signal("-TERM");
        self.process.end()
    }
}

/// A connection on which no read or write lasts.
pub fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&addr, PATIENCE).expect("connects");
    stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("timeout");
    stream.set_nodelay(true).expect("nodelay");
    stream
}

/// Python 3, for peers that know nothing of corelane; `None`, with a note, where there is none.
pub fn python(script: &str) -> Option<Process> {
    let there = Command::new("python3").arg("--version").output();
    if !there.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no python3 here");
        return None;
    }
    Some(Process::spawn(Command::new("python3").args(["-u", "-c", script])))
}
