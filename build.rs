//! Names the shared library. Cargo sets no SONAME; without one, programs would record the path that they were linked with.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Upstream's library has no version in its name, and programs linked with it ask for exactly this one.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtransfer_engine.so");
}
