# The commands of this repository. "make help" lists them.

CARGO ?= cargo
# Absolute, because the tests run cargo from other directories.
export CARGO_TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
RELEASE := $(CARGO_TARGET_DIR)/release
# Without the RDMA transport and what building it needs, and without metadata servers: make FEATURES=--no-default-features
export FEATURES ?=

BUILD := $(CURDIR)/build
STAGE := $(BUILD)/stage

# Also for the makefiles that cmake writes.
MAKEFLAGS += --no-print-directory

# Where "make install" puts things. LIBDIR may be what the distribution uses, such as /usr/lib/x86_64-linux-gnu.
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
BINDIR := $(PREFIX)/bin
INCLUDEDIR := $(PREFIX)/include
DOCDIR := $(PREFIX)/share/doc/transfer-engine

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n1)
# Before 1.0 a new minor version may break its callers; the C++ library is named for that, as in cxx/CMakeLists.txt.
CXX_SERIES := $(shell echo $(VERSION) | sed -E 's/^(0\.[0-9]+|[1-9][0-9]*).*/\1/')
# What a program that links the static library needs besides, in the order of "rustc --print native-static-libs".
STATIC_LIBRARIES := gcc_s util rt pthread m dl c

SOURCES := Cargo.toml Cargo.lock build.rs $(shell find src te/src te/Cargo.toml -type f)
ARTEFACTS := $(addprefix $(RELEASE)/,libtransfer_engine.so libtransfer_engine.a te)
HEADERS := include/te.h include/transfer_engine_c.h
# Of the C++ part, which is built with cmake by the compiler that CXX names: upstream's C++ class.
CXX_HEADERS := $(shell find include/mooncake -type f)

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help build cxx demo install install-cxx uninstall stage-c stage clean setup-cxx setup-test setup-test-servers setup-test-cpp \
	lint unit abi abi-update loom ctests interop test test-servers test-cpp test-sanitize test-sanitize-c test-sanitize-cpp test-sanitize-rust \
	sanitized-thread sanitized-address test-miri test-lab test-all fuzz

help:
	@echo 'make                 build the release library and the program te'
	@echo 'make demo            build everything and move data between two processes of a small C++ engine'
	@echo 'make install         install under PREFIX=$(PREFIX) (also DESTDIR, LIBDIR)'
	@echo 'make cxx             build the C++ part: Mooncake'"'"'s C++ class, with cmake and the compiler CXX'
	@echo 'make install-cxx     install it, too; same variables'
	@echo 'make uninstall       remove what these put there; same variables'
	@echo 'make test            format, lints, unit and model tests, the binary interface, C and C++ tests of the installed tree, valgrind, Mooncake as peer'
	@echo 'make test-servers    metadata servers: redis, etcd, Mooncake'"'"'s own and that of the program te, with Mooncake as peer'
	@echo 'make test-cpp        programs that use Mooncake'"'"'s C++ class, by g++ and clang, with and without glog and jsoncpp'
	@echo 'make test-sanitize   the C and C++ tests with the address, undefined behaviour and thread sanitizers; the Rust code, too, with a nightly toolchain'
	@echo 'make test-miri       the registry under miri, where a nightly toolchain has it'
	@echo 'make test-lab        the RDMA transport with the kernel'"'"'s own soft-RoCE and soft-iWARP devices, in a virtual machine'
	@echo 'make test-all        all of these'
	@echo 'make fuzz            every fuzz target for TIME=$(TIME) seconds, where a nightly toolchain and cargo-fuzz are'
	@echo 'make abi             compare the binary interface with abi/transfer_engine.abi (abi-update: write that anew)'
	@echo 'make clean           remove build/ and target/'

build:
	@scripts/setup build
	$(CARGO) build --release --locked --workspace $(FEATURES)

# Only when a source is newer than what was built: "sudo make install" must not need cargo.
$(ARTEFACTS) &: $(SOURCES)
	$(CARGO) build --release --locked --workspace $(FEATURES)
	@touch $(ARTEFACTS)

# --- install -----------------------------------------------------------------------------------------------------------------

PREFIX_FROM_LIBDIR = $(shell realpath -m --relative-to='$(LIBDIR)' '$(PREFIX)')
fill = sed -e 's|@VERSION@|$(VERSION)|g' \
	-e 's|@PREFIX_FROM_LIBDIR@|$(PREFIX_FROM_LIBDIR)|g' \
	-e 's|@STATIC_LINK_FLAGS@|$(addprefix -l,$(STATIC_LIBRARIES))|g' \
	-e 's|@STATIC_LIBRARIES@|$(subst $(eval ) ,;,$(STATIC_LIBRARIES))|g'

# The loader finds a new library in a directory of the system only by its cache. Staged files are not the system's.
update_loader_cache = $(if $(DESTDIR)$(filter $(BUILD)/%,$(abspath $(LIBDIR))),,\
	@PATH="$$PATH:/usr/sbin:/sbin"; if [ "$$(id -u)" -eq 0 ] && command -v ldconfig >/dev/null; then ldconfig >/dev/null 2>&1 || true; fi)

INSTALLED := \
	$(LIBDIR)/libtransfer_engine.so $(LIBDIR)/libtransfer_engine.a \
	$(LIBDIR)/cmake/TransferEngine/TransferEngineConfig.cmake \
	$(LIBDIR)/cmake/TransferEngine/TransferEngineConfigVersion.cmake \
	$(LIBDIR)/cmake/TransferEngine/TransferEngineTargets.cmake \
	$(LIBDIR)/pkgconfig/transfer_engine.pc \
	$(patsubst include/%,$(INCLUDEDIR)/%,$(HEADERS)) \
	$(BINDIR)/te $(DOCDIR)/LICENSE
INSTALLED_CXX := \
	$(LIBDIR)/libtransfer_engine_cxx.so $(LIBDIR)/libtransfer_engine_cxx.so.$(CXX_SERIES) $(LIBDIR)/libtransfer_engine_cxx.a \
	$(LIBDIR)/mooncake/libbase.a \
	$(LIBDIR)/cmake/TransferEngine/TransferEngineMooncake.cmake \
	$(LIBDIR)/cmake/TransferEngine/TransferEngineMooncakeDependencies.cmake \
	$(LIBDIR)/pkgconfig/transfer_engine-mooncake.pc \
	$(patsubst include/%,$(INCLUDEDIR)/%,$(CXX_HEADERS))

install: $(ARTEFACTS)
	install -d '$(DESTDIR)$(LIBDIR)/cmake/TransferEngine' '$(DESTDIR)$(LIBDIR)/pkgconfig' '$(DESTDIR)$(INCLUDEDIR)' \
		'$(DESTDIR)$(BINDIR)' '$(DESTDIR)$(DOCDIR)'
	install -p -m 755 $(RELEASE)/libtransfer_engine.so '$(DESTDIR)$(LIBDIR)/'
	install -p -m 644 $(RELEASE)/libtransfer_engine.a '$(DESTDIR)$(LIBDIR)/'
	install -p -m 755 $(RELEASE)/te '$(DESTDIR)$(BINDIR)/'
	install -p -m 644 $(HEADERS) '$(DESTDIR)$(INCLUDEDIR)/'
	install -p -m 644 LICENSE '$(DESTDIR)$(DOCDIR)/'
	for file in Config ConfigVersion Targets; do \
		$(fill) cmake/TransferEngine$$file.cmake.in > '$(DESTDIR)$(LIBDIR)/cmake/TransferEngine/'TransferEngine$$file.cmake || exit 1; \
	done
	$(fill) cmake/transfer_engine.pc.in > '$(DESTDIR)$(LIBDIR)/pkgconfig/transfer_engine.pc'
	$(update_loader_cache)

# Against an installed tree of its own, since that of PREFIX may not be there yet, or be of another version.
CXX_STAGE := $(BUILD)/cxx-stage
CXX_BUILD := $(BUILD)/cxx-$(notdir $(lastword $(CXX)))
cxx: setup-cxx $(ARTEFACTS)
	@$(MAKE) -s install PREFIX=$(CXX_STAGE) LIBDIR=$(CXX_STAGE)/lib DESTDIR=
	CXX='$(CXX)' cmake -S cxx -B $(CXX_BUILD) -DCMAKE_PREFIX_PATH=$(CXX_STAGE) -DCMAKE_INSTALL_PREFIX='$(PREFIX)' -DCMAKE_INSTALL_LIBDIR='$(LIBDIR)' \
		$(CXX_OPTIONS)
	cmake --build $(CXX_BUILD) --parallel 2

install-cxx: cxx
	DESTDIR='$(DESTDIR)' cmake --install $(CXX_BUILD)
	$(update_loader_cache)

uninstall:
	rm -f $(foreach file,$(INSTALLED) $(INSTALLED_CXX),'$(DESTDIR)$(file)')
	-rmdir --ignore-fail-on-non-empty '$(DESTDIR)$(LIBDIR)/cmake/TransferEngine' '$(DESTDIR)$(DOCDIR)'
	-find '$(DESTDIR)$(INCLUDEDIR)/mooncake' '$(DESTDIR)$(LIBDIR)/mooncake' -depth -type d -empty -delete 2>/dev/null
	$(update_loader_cache)

# What the demo and the tests use: never the build tree. For the tests with the C++ part, where there is what builds it.
stage-c: build
	@rm -rf $(STAGE)
	@$(MAKE) -s install PREFIX=$(STAGE) LIBDIR=$(STAGE)/lib DESTDIR=
	@echo 'Installed into $(STAGE)'

stage: stage-c
	@if command -v cmake >/dev/null && command -v $(CXX) >/dev/null; then \
		$(MAKE) -s install-cxx PREFIX=$(STAGE) LIBDIR=$(STAGE)/lib DESTDIR= >$(BUILD)/cxx.log || { cat $(BUILD)/cxx.log; exit 1; }; \
	else \
		echo 'Without the C++ part: no cmake, or no C++ compiler'; \
	fi

clean:
	rm -rf $(BUILD) $(CARGO_TARGET_DIR)

# --- demo --------------------------------------------------------------------------------------------------------------------

demo:
	@scripts/setup demo
	@$(MAKE) stage-c
	cmake -S demo -B $(BUILD)/demo -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=$(STAGE)
	cmake --build $(BUILD)/demo
	$(BUILD)/demo/demo

# --- tests -------------------------------------------------------------------------------------------------------------------

test: setup-test lint unit abi loom ctests interop
	@echo 'make test: passed'

test-all: test test-servers test-cpp test-sanitize test-miri test-lab
	@echo 'make test-all: passed'

setup-cxx:
	@CXX='$(CXX)' scripts/setup cxx

setup-test:
	@scripts/setup test

setup-test-servers:
	@scripts/setup test-servers

setup-test-cpp:
	@scripts/setup test-cpp

lint:
	@version=$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml); \
		grep -qF "Rust $$version or later" README.md || { echo "README.md must say: Rust $$version or later" >&2; exit 1; }
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace $(FEATURES) --all-targets -- -D warnings

unit:
	MC_LOG_LEVEL=ERROR $(CARGO) test --locked --workspace $(FEATURES)

# Of the development build, because types are in full debug information only; the unit tests have built it already.
abi_library = $(CARGO_TARGET_DIR)/debug/deps/libtransfer_engine.so
abi: setup-test
	$(CARGO) test --locked --workspace $(FEATURES) --no-run --quiet
	scripts/abi check $(abi_library) abi/transfer_engine.abi

abi-update: setup-test
	$(CARGO) test --locked --workspace $(FEATURES) --no-run --quiet
	scripts/abi update $(abi_library) abi/transfer_engine.abi

# Every interleaving of in-flight guards against draining. A target directory of its own: the flag changes every crate.
# A filter that matches nothing would pass, so here and below the tests are listed first.
loom_test = CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom RUSTFLAGS='--cfg loom -D warnings' $(CARGO) test --locked --release --no-default-features --lib loom_tests
loom:
	$(loom_test) -- --list | grep ': test$$'
	$(loom_test)

comma := ,
ctest = ctest --output-on-failure --no-tests=error --parallel 2
configure_ctests = cmake -S ctests -DCMAKE_PREFIX_PATH=$(STAGE) -DCARGO=$(shell command -v $(CARGO))

ctests: stage
	$(configure_ctests) -B $(BUILD)/ctests
	cmake --build $(BUILD)/ctests --parallel 2
	cd $(BUILD)/ctests && $(ctest)

interop: stage
	tests/interop/run $(STAGE)/lib/libtransfer_engine.so

# Each server is started by the tests, on a free port and in a directory of its own.
test-servers: setup-test-servers stage
	tests/interop/run --servers $(STAGE)/lib/libtransfer_engine.so

# Programs that use upstream's C++ class, by two compilers. They find glog and jsoncpp in one half of the runs; in the other, these are hidden
# from them, and clang has built the library.
without = $(foreach package,glog jsoncpp numa,-DCMAKE_DISABLE_FIND_PACKAGE_$(package)=ON)
cpp_compilers = g++ clang++
# test_cpp NAME STAGE COMPILER OPTIONS
define test_cpp
	cmake -S ctests/cpp -B $(BUILD)/cpp-$(1)-$(3) -DCMAKE_PREFIX_PATH=$(2) -DCMAKE_CXX_COMPILER=$(3) $(4)
	cmake --build $(BUILD)/cpp-$(1)-$(3) --parallel 2
	cd $(BUILD)/cpp-$(1)-$(3) && $(ctest)

endef
test-cpp: setup-test-cpp stage
	rm -rf $(STAGE)-without
	@$(MAKE) -s install PREFIX=$(STAGE)-without LIBDIR=$(STAGE)-without/lib DESTDIR=
	@$(MAKE) -s install-cxx PREFIX=$(STAGE)-without LIBDIR=$(STAGE)-without/lib DESTDIR= CXX_BUILD=$(BUILD)/cxx-without \
		CXX=clang++ CXX_OPTIONS='$(without)'
	$(foreach compiler,$(cpp_compilers),$(call test_cpp,with,$(STAGE),$(compiler)))
	$(foreach compiler,$(cpp_compilers),$(call test_cpp,without,$(STAGE)-without,$(compiler),$(without)))
	tests/interop/run --benchmark $(BUILD)/cpp-with-g++/transfer_engine_bench

test-sanitize: test-sanitize-c test-sanitize-cpp test-sanitize-rust

# The library itself is the ordinary one; the sanitizers watch what crosses its boundary and what the C side does with it.
test-sanitize-c: setup-test stage
	$(configure_ctests) -B $(BUILD)/ctests-address -DSANITIZE=address,undefined
	cmake --build $(BUILD)/ctests-address --parallel 2
	cd $(BUILD)/ctests-address && $(ctest) -L client
	$(configure_ctests) -B $(BUILD)/ctests-thread -DSANITIZE=thread
	cmake --build $(BUILD)/ctests-thread --parallel 2
	cd $(BUILD)/ctests-thread && $(ctest) -L client

# The same with the C++ class and the programs that use it, both built with the sanitizers.
define test_sanitized_cpp
	cmake -S ctests/cpp -B $(BUILD)/cpp-$(1) -DCMAKE_PREFIX_PATH=$(STAGE) -DSANITIZE=$(2)
	cmake --build $(BUILD)/cpp-$(1) --parallel 2
	cd $(BUILD)/cpp-$(1) && $(ctest)
endef
test-sanitize-cpp: setup-test-cpp stage
	$(call test_sanitized_cpp,address,address$(comma)undefined)
	$(call test_sanitized_cpp,thread,thread)

# The library and its tests as well, by a nightly rustc. Its runtime then takes the place of the C compiler's in the clients. The thread
# sanitizer has to see all synchronization, so the standard library is built anew for it; crossbeam-epoch, whose fences it does not
# understand, notices by itself and does without. In a child of a process with threads, the sanitizers' threads do not work, which is
# what the tests of sys::signals are made of.
nightly_sysroot = $(shell rustc +nightly --print sysroot 2>/dev/null)
nightly_target = $(shell rustc +nightly --print host-tuple 2>/dev/null)
sanitized_cargo = MC_LOG_LEVEL=ERROR CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/$(1) CARGO_PROFILE_DEV_OPT_LEVEL=1 RUSTFLAGS=-Zsanitizer=$(1) \
	TSAN_OPTIONS='die_after_fork=0 halt_on_error=1 suppressions=$(CURDIR)/tests/thread-sanitizer-suppressions.txt' \
	$(CARGO) +nightly $(2) --locked --target $(nightly_target) $(if $(filter thread,$(1)),-Zbuild-std)
define test_sanitized_rust
	$(call sanitized_cargo,$(1),test) --lib --test stress -- --skip sys::signals
	$(call sanitized_cargo,$(1),build) --lib
	rm -rf $(STAGE)-$(1)
	cp -r $(STAGE) $(STAGE)-$(1)
	cp $(CARGO_TARGET_DIR)/$(1)/$(nightly_target)/debug/libtransfer_engine.so $(STAGE)-$(1)/lib/
	$(configure_ctests) -B $(BUILD)/ctests-rust-$(1) -DCMAKE_PREFIX_PATH=$(STAGE)-$(1) -DSANITIZE=$(1) \
		-DSANITIZER_RUNTIME=$(nightly_sysroot)/lib/rustlib/$(nightly_target)/lib/librustc-nightly_rt.$(2).a
	cmake --build $(BUILD)/ctests-rust-$(1) --parallel 2
	cd $(BUILD)/ctests-rust-$(1) && $(ctest) -L client
endef
test-sanitize-rust:
	@if [ -n '$(nightly_sysroot)' ] && [ -d '$(nightly_sysroot)/lib/rustlib/src/rust/library' ]; then \
		$(MAKE) sanitized-thread sanitized-address; \
	else \
		echo 'test-sanitize-rust: skipped, no nightly toolchain with rust-src here (rustup component add rust-src --toolchain nightly)'; \
	fi
# Without the C++ programs, which test-sanitize-cpp runs: what their peers, processes of the same program, put in order is not seen.
sanitized-thread: setup-test stage
	$(call test_sanitized_rust,thread,tsan)
sanitized-address: setup-test stage
	$(call test_sanitized_rust,address,asan)

# The machine boots in seconds where it can run guests, and in half a minute by emulation; the tests take some minutes.
lab = scripts/rdma-lab --timeout 900 --devices rxe0,rxe1,rxe2,rxe3,siw0 --rw $(BUILD)
test-lab: setup-test setup-test-cpp stage
	@if ! scripts/rdma-lab --setup; then \
		echo 'test-lab: skipped, the lab cannot be set up here'; \
	else \
		set -e; \
		test=$$($(CARGO) test --locked --test rdma_lab --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))/\1/p'); \
		[ -n "$$test" ] || { $(CARGO) test --locked --test rdma_lab --no-run; exit 1; }; \
		$(lab) -- "$$test" --ignored --test-threads 1; \
		tests/interop/run --setup; \
		$(lab) -- tests/interop/run $(STAGE)/lib/libtransfer_engine.so test_rdma; \
		cmake -S ctests/cpp -B $(BUILD)/cpp-with-g++ -DCMAKE_PREFIX_PATH=$(STAGE) -DCMAKE_CXX_COMPILER=g++; \
		cmake --build $(BUILD)/cpp-with-g++ --parallel 2; \
		$(lab) -- sh -c 'set -- $$RDMA_LAB_DEVICES; export TE_TEST_NICS=$${1%%=*} TE_TEST_HOST=$${1#*=}; \
			cd $(BUILD)/cpp-with-g++ && $(ctest) --timeout 300 -L consumer -E "benchmark$$"'; \
	fi

# Tree borrows, because crossbeam-epoch itself stops under miri's default rules; leaks are its garbage that nobody collects at exit.
miri_test = CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/miri \
	MIRIFLAGS='-Zmiri-tree-borrows -Zmiri-ignore-leaks -Zmiri-disable-isolation -Zmiri-permissive-provenance' \
	$(CARGO) +nightly miri test --locked --no-default-features --lib registry::
test-miri:
	@if $(CARGO) +nightly miri --version >/dev/null 2>&1; then \
		set -ex; $(miri_test) -- --list | grep ': test$$'; $(miri_test); \
	else \
		echo 'test-miri: skipped, no nightly toolchain with miri here (rustup component add miri --toolchain nightly)'; \
	fi

# What it finds lands in build/fuzz, and inputs that fail in fuzz/artifacts. "make unit" runs the committed corpus.
TIME ?= 60
FUZZ_TARGETS ?= $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
cargo_fuzz = CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/fuzz $(CARGO) +nightly fuzz
fuzz:
	@if $(cargo_fuzz) --version >/dev/null 2>&1; then \
		set -e; \
		for target in $(FUZZ_TARGETS); do \
			mkdir -p $(BUILD)/fuzz/$$target; \
			$(cargo_fuzz) run $$target $(BUILD)/fuzz/$$target fuzz/corpus/$$target -- \
				-max_total_time=$(TIME) -max_len=2048 -timeout=60; \
		done; \
	else \
		echo 'fuzz: skipped, no nightly toolchain with cargo-fuzz here (rustup toolchain install nightly; cargo install cargo-fuzz)'; \
	fi
