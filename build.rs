//! Names the shared library in itself, so that programs that were linked to upstream's find this one.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtransfer_engine.so");
}
