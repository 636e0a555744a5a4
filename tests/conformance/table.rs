//! `docs/conformance.md`, made from the list.

use std::fmt::Write;
use std::path::PathBuf;

use crate::LIST;
use crate::list::{Column, Scenario};

fn cell(scenario: &Scenario, column: Column) -> String {
    match (scenario.not_applicable(column), scenario.differs(column)) {
        (Some(why), _) => format!("n/a: {why}"),
        (None, Some(why)) => format!("differs: {why}"),
        (None, None) => "✓".to_owned(),
    }
}

fn page() -> String {
    let mut page = String::from(
        "# What every backend does\n\n\
         Made from the list in `tests/conformance/main.rs` by `CORELANE_BLESS=1 cargo test --test conformance table`; \
         a test compares the two.\n\n\
         Each scenario is written once, against the public API, and is a test of its own on every backend: \
         `cargo test --test conformance epoll::` plays all of them on epoll, `… uring::burst_of_connections_is_served` \
         one of them on io_uring. ✓: it is played and ends as described. \"differs\": it is played, with the \
         expectation that the text gives. \"n/a\": it cannot be played there, for the reason given. \
         Where the system has no io_uring, its columns say so and are skipped.\n\n\
         | column | tests | what it is |\n|---|---|---|\n\
         | uring | `uring::` | io_uring with everything that the kernel has; direct descriptors |\n\
         | uring, fds | `uring_fd::` | io_uring with ordinary descriptors |\n\
         | uring 5.19 | `uring_5_19::` | io_uring with what Linux 5.19 has of it (`UringFeatures::LINUX_5_19`) |\n\
         | uring least | `uring_least::` | the least that the backend works with (`UringFeatures::LEAST`), ordinary descriptors |\n\
         | epoll | `epoll::`, `auto::` | epoll; and once more under seccomp filters that forbid io_uring (`ci/seccomp.sh`), also by `Backend::Auto` |\n\
         | iocp | `iocp::` | I/O completion ports (run under Wine) |\n\
         | sim | `sim::` | the simulated kernel, 5 seeds (`CORELANE_SIM_SEEDS=0..1000` widens the search) |\n\
         | sim + faults | `sim_faults::` | the simulated kernel with everything going wrong that a correct program does not notice, 3 seeds |\n",
    );
    page.push_str(
        "\n## Exceptions\n\nEverywhere else the columns agree.\n\n| scenario | column | |\n|---|---|---|\n",
    );
    for scenario in LIST {
        for (column, name) in Column::SHOWN {
            let cell = cell(scenario, column);
            if cell != "✓" {
                writeln!(page, "| `{}` | {name} | {cell} |", scenario.name).expect("a string");
            }
        }
    }
    let mut topic = "";
    for scenario in LIST {
        if scenario.topic != topic {
            topic = scenario.topic;
            let heads = Column::SHOWN.map(|(_, name)| name).join(" | ");
            let rule = "---|".repeat(Column::SHOWN.len());
            let title = topic.replace('_', "-");
            write!(page, "\n## {title}\n\n| scenario | guards | {heads} |\n|---|---|{rule}\n")
                .expect("a string");
        }
        let cells = Column::SHOWN.map(|(column, _)| cell(scenario, column)).join(" | ");
        let guards = scenario.guards.trim();
        writeln!(page, "| `{}` | {guards} | {cells} |", scenario.name).expect("a string");
    }
    writeln!(page, "\n{} scenarios.", LIST.len()).expect("a string");
    page
}

#[test]
fn the_document_is_what_the_list_says() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs/conformance.md");
    let page = page();
    if std::env::var_os("CORELANE_BLESS").is_some() {
        std::fs::write(&path, page).expect("the document can be written");
        return;
    }
    // Where the sources are not (a test program that was copied elsewhere), there is nothing to compare.
    let Ok(written) = std::fs::read_to_string(&path) else {
        assert!(!path.parent().is_some_and(std::path::Path::is_dir), "{} is missing", path.display());
        return;
    };
    assert!(
        written.replace("\r\n", "\n") == page,
        "docs/conformance.md is not what the list says: write it anew with \
         `CORELANE_BLESS=1 cargo test --test conformance table`",
    );
}

#[test]
fn every_scenario_says_what_it_guards_and_every_exception_why() {
    assert!(LIST.len() >= 45, "{} scenarios", LIST.len());
    for scenario in LIST {
        assert!(scenario.guards.trim().len() > 20, "{} does not say what it guards", scenario.name);
        assert!(!scenario.guards.contains('|'), "{}: a bar would break the table", scenario.name);
        for exception in scenario.exceptions {
            assert!(exception.why.len() > 10 && !exception.columns.is_empty(), "{}", scenario.name);
        }
    }
}
