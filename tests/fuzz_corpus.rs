//! Runs the bodies of the fuzz targets over the committed inputs of `fuzz/corpus`: what fuzzing has found stays found, on the stable
//! toolchain. `make fuzz` looks for more.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg_attr(not(feature = "rdma"), allow(dead_code))]
#[path = "../fuzz/src/lib.rs"]
mod targets;

/// Panics on threads of engines, also those that are caught there. A body that panics fails its own test.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn run_corpus(target: &str, run: fn(&[u8])) {
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::thread::current().name().is_some_and(|name| name.starts_with("te-")) {
                PANICS.fetch_add(1, Ordering::SeqCst);
            }
            previous(info);
        }));
    });
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut inputs: Vec<_> = directory.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= 5, "{} has {} inputs", directory.display(), inputs.len());
    run(b"");
    for input in inputs {
        println!("{}", input.display());
        run(&std::fs::read(&input).unwrap());
        assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a thread of an engine panicked");
    }
}

macro_rules! corpus_tests {
    ($($target:ident)*) => {$(
        #[test]
        fn $target() {
            run_corpus(stringify!($target), targets::$target::run);
        }
    )*};
}

corpus_tests! {
    addresses configuration data_replies data_requests descriptors entry_points handshake_replies handshake_requests topologies
}

#[cfg(feature = "rdma")]
corpus_tests! {
    connections
}
