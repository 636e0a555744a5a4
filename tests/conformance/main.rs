//! The conformance suite: one list of behaviours, played on every backend through the public API.
//!
//! A scenario is a function of a [`Bed`](bed::Bed), which hides whether the kernel is real or simulated and
//! who plays the foreign programs. The list below makes of each a test per backend (`uring::…`, `epoll::…`,
//! `sim::…`), and the table in `docs/conformance.md`. Where a backend may end otherwise, the list says so,
//! with the reason; nothing is left out silently.
//!
//! | file | what it is |
//! |---|---|
//! | `main.rs` | the list |
//! | `list.rs` | what an entry is, and how it is played |
//! | `bed.rs`, `bed/` | the stage: servers, foreign programs, waiting; on a real kernel and on the simulated one |
//! | `script.rs` | the handler made of closures, and its log |
//! | `scenarios/` | the scenarios, by topic |
//! | `table.rs` | the document |

mod bed;
mod bytes;
mod list;
mod scenarios;
mod script;
mod table;

use list::{Column, Exception, IOCP, Kind, SIMS, Scenario, conformance, play};

conformance! {
    accept {
        /// A burst of 200 connections: every one is accepted and answered.
        burst_of_connections_is_served;
        /// What waited in the listener's queue while the worker was busy is all taken, with the data it brought.
        burst_that_waited_is_served_in_one_go;
        /// Connections that come and go in any order: as many are accepted, and ended, as there were.
        churn_loses_no_connection;
        /// At `max_connections` nobody is turned away: clients wait in the kernel and are served when others leave.
        at_the_limit_the_next_waits_until_there_is_room;
        /// `on_accept` returning `None` closes the connection, and takes no place from the next.
        connection_refused_by_the_handler_is_closed;
        /// Sixteen listeners of one worker: each connection is told with the listener that it came from.
        listeners_are_told_apart;
        /// `on_accepted` may send at once.
        server_may_speak_first;
        /// Data and FIN of a client that closed before it was accepted are delivered.
        client_that_left_before_it_was_accepted_is_heard;
        /// Connections reset while they wait to be accepted do not disturb the others.
        reset_before_the_accept_is_handled_harms_nobody;
    }
    stream {
        /// 300 KB are echoed, byte for byte.
        echo_returns_every_byte_in_order;
        /// Writes of one byte each: none is lost, doubled or overtaken.
        bytes_sent_one_by_one_arrive_in_order;
        /// 200 framed messages sent at once: coalescing loses none.
        many_messages_in_one_segment_are_all_answered;
        /// Framed messages cut at random places, also within their lengths.
        message_cut_anywhere_is_put_together;
        /// A peer that takes one byte at a time.
        peer_that_reads_byte_by_byte_gets_every_byte;
        /// 8 MiB through small buffers to a reader that is much slower than the server; `on_writable` comes once.
        eight_megabytes_reach_a_slow_reader;
        /// Sending nothing is accepted and does nothing: no event is lost, nothing changes its place.
        empty_payload_is_harmless;
        /// Leases, composed, owned, shared and static bytes in one queue go out in the order of sending.
        every_kind_of_payload_keeps_its_place;
        /// A callback that queues more payloads than one system call takes.
        thousand_small_payloads_of_one_callback_keep_their_order;
        /// Leases kept while others receive from the same pool are never written to again.
        no_buffer_is_in_two_hands;
        /// A megabyte each way at the same time, without waiting for each other.
        both_directions_go_on_at_once;
    }
    half_close {
        /// The peer's FIN ends its direction only: 200 KB still reach it, then a clean end.
        peer_that_finishes_first_still_receives_everything;
        /// `shutdown_write` ends the server's direction only: it still receives, and is told of the end.
        server_that_finishes_first_still_receives_everything;
        /// Sending after the finish is refused with the payload, and never a signal.
        nothing_is_sent_after_the_finish;
        /// `close` sends what is queued, then FIN, and waits for the peer.
        graceful_close_delivers_what_is_queued;
        /// A peer that goes on sending to a server that closed gets everything and no reset.
        graceful_close_does_not_reset_a_peer_that_still_sends;
        /// Data with FIN right behind it: the data is delivered, the end is told, the answer arrives.
        data_and_an_immediate_finish_are_both_seen;
        /// Data with `close(2)` right behind it: the same, though nobody reads the answer.
        data_and_an_immediate_close_are_both_seen;
        /// A connection that never carried data ends with `on_eof` and `on_closed`, once each.
        end_without_data_is_an_end;
        /// Both sides finish at the same time: no reset, one end.
        both_may_finish_at_once;
    }
    reset {
        /// A reset is reported as `Reset`, and `on_eof` is not called.
        reset_of_an_idle_connection_is_no_clean_end;
        /// A reset while a send is in flight and more is queued: everything comes back.
        reset_during_a_send_ends_the_connection;
        /// A reset after everything was sent and read.
        reset_after_a_send_ends_the_connection;
        /// Data that arrived before the reset is delivered first.
        data_before_a_reset_is_delivered [
            Differs(IOCP, "a prefix of the data, since Windows may drop what is unread when a reset arrives"),
        ];
        /// `abort` drops what is queued and resets, also when `close` follows.
        abort_is_a_reset_for_the_peer;
        /// Sending on to a peer that closed ends the connection with an error, and never a signal.
        sending_to_a_peer_that_closed_ends_the_connection;
        /// A peer that closes with unread bytes (a reset on its way) ends the connection once.
        peer_that_closes_with_answers_unread_is_gone_once;
    }
    cancel {
        /// Pauses at random moments while data arrives: nothing lost, nothing twice, in order.
        pause_racing_data_loses_nothing;
        /// `close` and `abort`, from inside and outside, in the moment of a completing send: one end each.
        close_racing_a_send_ends_once;
        /// `close` and `abort` while data arrives: one end each, and a right beginning of the echo.
        close_racing_data_ends_once;
        /// Receive armed, send stuck, leases held: an abort or a reset gives all of it back.
        abort_with_everything_in_flight_gives_everything_back;
        /// A stop without a deadline, with receives, sends and connects in flight: 0 operations, 0 buffers left.
        stop_with_everything_in_flight_leaves_nothing;
        /// Dropping the runtime ends every connection and frees the address.
        dropped_runtime_lets_go_of_everything [
            NotApplicable(SIMS, "a simulated worker lives as long as its world"),
        ];
        /// Pausing and resuming many times in one turn comes to nothing.
        pause_and_resume_without_end_change_nothing;
    }
    connect {
        /// `Cx::connect`: established, data both ways, closed by the other side.
        outgoing_connection_carries_data_both_ways;
        /// Nobody listens: `ConnectFailed` with the system's "refused", every time.
        refused_connect_stays_refused;
        /// Nobody answers: `ConnectTimeout`, not before its time.
        unanswered_connect_times_out [
            Differs(IOCP, "refused at once instead, where Windows answers for a full queue by a reset"),
        ];
        /// `close` and `abort` of a connect in flight end it once; `on_connected` is not called.
        connect_taken_back_is_closed_once [
            Differs(IOCP, "may have been refused already, where Windows answers for a full queue by a reset"),
        ];
        /// `connect` and `abort` in one callback.
        connect_taken_back_in_its_own_turn_is_closed_once;
        /// One worker holds both ends of a connection.
        worker_may_connect_to_itself;
        /// `send` right after `connect`: the bytes wait for the connection and go first.
        bytes_queued_before_the_connection_is_there_are_sent_first;
        /// `close` right after that: they are still sent.
        close_before_the_connection_is_there_still_sends_what_waits;
        /// A hundred connects in one callback, none mixed up.
        hundred_connects_at_once_are_all_made;
    }
    pause {
        /// A paused connection is given nothing; everything comes in order when it resumes.
        data_waits_for_the_end_of_a_pause;
        /// FIN during a pause is told after the data before it, and after the pause.
        end_waits_behind_data_during_a_pause;
        /// A pause between two pieces of data, again and again.
        pause_in_the_middle_keeps_the_order;
        /// A reset during a pause does not take the data before it away.
        reset_during_a_pause_comes_after_the_data [
            Differs(IOCP, "only that it is a reset, since Windows may drop what is unread when a reset arrives"),
        ];
        /// Nothing is read for a paused connection: its peer is slowed down.
        pause_slows_the_peer_down;
    }
    pressure {
        /// High and low water: congested once, writable once, for each time.
        congested_connection_becomes_writable_once;
        /// At `send_limit` the payload comes back; there is room again after `on_writable`.
        full_queue_gives_the_payload_back;
        /// An echo to a peer that does not read keeps a bounded number of bytes, and loses none.
        reader_that_stalls_stalls_only_its_own_sending;
        /// 24 senders, 4 buffers: the pool runs dry again and again, every stream stays whole.
        more_senders_than_buffers_are_all_answered;
        /// The handler keeps every lease: receiving stops, and goes on when it lets go.
        pool_kept_by_the_handler_recovers;
        /// FIN that arrives while no buffer is free is told all the same.
        end_hidden_behind_exhaustion_is_seen;
        /// Leases stuck in the queues of peers that do not read are taken back for the others.
        buffers_kept_by_slow_readers_are_taken_back;
    }
    fairness {
        /// A hundred quiet connections are answered while one sends without end.
        flood_does_not_hide_a_hundred_quiet_connections;
        /// Two floods: neither gets ten times as much as the other.
        two_floods_progress_side_by_side;
        /// A handler that posts to itself without end does not keep others from being served.
        handler_that_always_has_something_to_do_hides_nobody;
    }
    time {
        /// The idle timeout closes who is silent, not before its time, and spares who talks.
        silent_connection_is_closed_and_a_talking_one_is_not;
        /// `set_idle_timeout` for one connection: longer, and off.
        idle_timeout_of_one_connection_may_differ;
        /// A deadline resets a busy connection; one that was taken back does not.
        deadline_ends_a_connection_whatever_it_does;
        /// Timers of several connections, set in one callback, fire in order and not early.
        timers_fire_in_the_order_of_their_times;
        /// `set_timer(None)` before its time.
        timer_taken_back_does_not_fire;
        /// A timer set again in `on_timer`: never early, and gone with its connection.
        periodic_timer_keeps_its_distance;
        /// The worker's alarm: set, replaced, taken back.
        alarm_fires_once_and_not_early;
        /// A graceful close to a peer that does not read becomes a reset after `close_timeout`.
        close_that_cannot_be_finished_is_a_reset;
        /// A graceful close to a peer that does not finish ends after `close_timeout`, without a reset.
        peer_that_never_finishes_is_let_go_of;
    }
    waiting {
        /// `WaitPolicy::Spin`: one peer at a time and eight at once.
        worker_that_spins_answers_everybody;
        /// `WaitPolicy::Coalesce`, likewise.
        worker_that_coalesces_answers_everybody;
        /// `WaitPolicy::Adaptive`, likewise.
        worker_that_adapts_answers_everybody;
        /// A connection's timer fires in its time while others' messages wait to be gathered.
        coalescing_delays_no_timer;
    }
    mailbox {
        /// 1,000 sends by `Remote` arrive in order.
        sends_from_outside_keep_their_order;
        /// Sends by `Remote` and by posted messages, alternating.
        sends_from_outside_and_from_inside_keep_their_order;
        /// `Remote` with the name of a closed connection does not touch the next one in its slot.
        name_of_a_closed_connection_reaches_nobody;
        /// A thread that sends while the connection closes: whole payloads or none, and one end.
        sends_from_outside_during_a_close_are_taken_or_dropped;
        /// `broadcast` to 60 connections of two workers, five times.
        broadcast_reaches_everybody_once;
        /// `Cx::post` between workers: in order, on the other one's thread.
        workers_post_to_each_other_in_order;
        /// A full mailbox refuses with the message, loses nothing that it took, and recovers.
        full_mailbox_gives_the_message_back;
        /// Whatever is sent to a worker that has stopped comes back as `Stopped`.
        stopped_worker_says_so;
        /// A stop does not overtake what was posted and sent before it.
        what_was_posted_before_a_stop_is_handled_first;
        /// Four threads post 500 messages each.
        messages_of_many_threads_are_all_handled;
    }
    shutdown {
        /// A graceful stop sends what is queued to who reads, and counts everybody as finished.
        stop_delivers_what_is_queued;
        /// At the deadline who does not read is reset, not before, and counted as aborted.
        stalled_peers_are_reset_at_the_deadline_and_counted;
        /// Clients beyond the limit, in the kernel's queue, see the end too.
        clients_that_wait_to_be_accepted_are_let_go_of;
        /// `on_stop` may still send; connecting is refused from then on.
        goodbye_in_on_stop_is_sent_and_nothing_new_begins;
        /// `Cx::stop` from a callback, which itself goes on.
        handler_may_stop_its_worker;
        /// A panic in a callback: the error names it, every socket of every worker is closed.
        panic_of_a_handler_is_reported_and_closes_everything [
            NotApplicable(SIMS, "a panic in a simulated worker is the test's own, with the seed"),
        ];
        /// A stop while a burst is being accepted.
        burst_in_the_moment_of_a_stop_is_let_go_of;
    }
    reuse {
        /// Few slots, thousands of connections with every kind of end: bytes, states and names never mix.
        thousands_of_short_lives_are_never_confused;
        /// The next connection gets the slot of one whose operations were in flight at its end.
        late_completions_do_not_reach_the_next_connection;
        /// Accepted and outgoing connections take turns in one slot.
        slot_serves_both_kinds_of_connections_in_turn;
    }
    address {
        /// Echo over IPv6, with the peer's address.
        ipv6_echo;
        /// `dual_stack`: both families on one listener, IPv4 addresses told as mapped ones.
        dual_stack_listener_takes_both_families [
            NotApplicable(SIMS, "the simulated network has no mapped addresses"),
        ];
        /// An IPv4 and an IPv6 listener side by side.
        listener_of_one_family_takes_only_that;
        /// `peer_addresses`: the address is the peer's own; without it nothing wrong is told.
        peer_address_is_told_when_asked_for;
        /// `ConnectConfig::source` is what the other side sees; mixed families are refused.
        source_address_of_an_outgoing_connection_is_kept;
    }
}
