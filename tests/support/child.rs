//! A test of this program run again as a process of its own, for what concerns a whole process:
//! its limits, its privileges, its system call filter.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use super::PATIENCE;

/// Set in the environment of a child, to the name of its role.
const ROLE: &str = "CORELANE_TEST_ROLE";
/// What a child has to say begins with this; the rest is the test harness's.
const SAYS: &str = "child: ";

/// The role that this process was started for, if it is a child.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Says a line to the parent.
pub fn say(line: &str) {
    println!("\n{SAYS}{line}");
}

/// The next line from the parent; `None` when it wants the end.
pub fn hear() -> Option<String> {
    let mut line = String::new();
    let n = std::io::stdin().read_line(&mut line).expect("standard input");
    (n > 0).then(|| line.trim_end().to_owned())
}

/// Whether a program is installed.
pub fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}

/// A child process; killed when it is dropped.
pub struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

/// Runs the test `name` of this program again, in a process that `wrap` (a program that executes the
/// rest of its command line) prepares.
pub fn rerun(name: &str, role: &str, wrap: &[&str]) -> Process {
    let program = std::env::current_exe().expect("the path of this program");
    rerun_program(&program, name, role, wrap)
}

/// As [`rerun`], from a copy of this program.
pub fn rerun_program(program: &std::path::Path, name: &str, role: &str, wrap: &[&str]) -> Process {
    let mut command = match wrap {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    };
    command.args(["--exact", name, "--nocapture", "--test-threads=1", "--quiet"]).env(ROLE, role);
    Process::spawn(command)
}

impl Process {
    pub fn spawn(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = child.stdout.take().expect("piped");
        Self { stdin: child.stdin.take(), child, lines: lines(stdout) }
    }

    /// The next line that the child says, without the prefix.
    pub fn hears(&mut self) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).expect("the child to say something");
            if let Some(said) = line.strip_prefix(SAYS) {
                return said.to_owned();
            }
        }
    }

    /// The next line of a child that is not a test of ours.
    pub fn line(&mut self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("a line of the child")
    }

    /// Says a line to the child.
    pub fn tells(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("the child still listens");
        writeln!(stdin, "{line}").expect("a child that listens");
    }

    /// Closes the child's input, reads the rest of what it says and waits for its success.
    pub fn ends(mut self) -> Vec<String> {
        drop(self.stdin.take());
        let mut rest = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            rest.push(line);
        }
        let status = self.child.wait().expect("the child's end");
        assert!(status.success(), "the child failed ({status}): {}", rest.join("\n"));
        rest.into_iter().filter_map(|line| line.strip_prefix(SAYS).map(str::to_owned)).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Over already, in the good case.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A child's lines, read by a thread, so that waiting for one can end.
fn lines(stdout: ChildStdout) -> Receiver<String> {
    let (line, lines) = channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        let mut bytes = Vec::new();
        while let Ok(1..) = reader.read_until(b'\n', &mut bytes) {
            let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            if line.send(text).is_err() {
                // Nobody listens: keep reading, so that the child is not held up.
                let _ = std::io::copy(&mut reader.by_ref(), &mut std::io::sink());
                return;
            }
        }
    });
    lines
}
