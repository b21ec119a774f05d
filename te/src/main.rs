//! The command-line program of the transfer engine.
fn main() {}
