//! Compiles the fake verbs library, for whoever wants to load it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles it into a directory, with `$CC` or `cc`. Other processes may do the same at the same time.
pub fn compile(directory: &Path) -> PathBuf {
    // Of the library's package, in which the program's lies.
    let mut packages = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|package| package.join("tests/fake_verbs"));
    let source = packages.find(|source| source.exists()).expect("the sources are there");
    let library = directory.join("libibverbs.so.1");
    let unfinished = directory.join(format!("libibverbs-{}", std::process::id()));
    let mut version_script = std::ffi::OsString::from("-Wl,--version-script=");
    version_script.push(source.join("fake_verbs.map"));
    let compiler = std::env::var_os("CC").unwrap_or("cc".into());
    let status = Command::new(compiler)
        .args(["-std=gnu11", "-shared", "-fPIC", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&unfinished)
        .arg(source.join("fake_verbs.c"))
        .arg(version_script)
        .status();
    assert!(status.unwrap().success(), "the fake verbs library does not compile");
    std::fs::rename(&unfinished, &library).unwrap();
    library
}
