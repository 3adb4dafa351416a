//! The confinement of paths, tested for both ways of resolving a path, and with races.

use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

struct Fixture {
    _directory: tempfile::TempDir,
    outside: PathBuf,
    base: PathBuf,
}

fn fixture() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let outside = directory.path().join("outside");
    let base = directory.path().join("base");
    std::fs::create_dir_all(&outside).unwrap();
    std::fs::create_dir_all(base.join("inner/deep")).unwrap();
    std::fs::write(outside.join("secret"), "secret").unwrap();
    std::fs::write(base.join("inner/file"), "inside").unwrap();
    symlink("../outside", base.join("up")).unwrap();
    symlink(&outside, base.join("absolute")).unwrap();
    symlink("inner", base.join("sideways")).unwrap();
    symlink("../inner/file", base.join("inner/round")).unwrap();
    symlink("loop", base.join("loop")).unwrap();
    Fixture {
        _directory: directory,
        outside,
        base,
    }
}

fn trees(base: &Path) -> Vec<Tree> {
    let kernel = Tree::open(base).unwrap();
    assert_eq!(
        kernel.resolution,
        Resolution::Kernel,
        "these tests need a kernel with openat2 (5.6)"
    );
    vec![
        kernel,
        Tree {
            resolution: Resolution::Walk,
            ..Tree::open(base).unwrap()
        },
    ]
}

fn below(tree: &Tree, path: &str) -> BelowBase {
    BelowBase::parse(tree.base(), path.as_bytes()).unwrap()
}

fn read(tree: &Tree, path: &str) -> Result<String, TreeError> {
    match tree.read(&below(tree, path))? {
        Node::Directory => Ok("directory".into()),
        Node::File { mut file, .. } => {
            let mut content = String::new();
            file.read_to_string(&mut content).unwrap();
            Ok(content)
        }
    }
}

fn write(tree: &Tree, path: &str, content: &str) -> Result<(), TreeError> {
    let pending = tree.create(&below(tree, path))?;
    pending
        .writer()
        .unwrap()
        .write_all(content.as_bytes())
        .unwrap();
    pending.commit()
}

#[test]
fn links_inside_are_followed_and_links_outside_are_not() {
    let fixture = fixture();
    for tree in trees(&fixture.base) {
        assert_eq!(read(&tree, "inner/file").unwrap(), "inside");
        assert_eq!(read(&tree, "sideways/file").unwrap(), "inside");
        assert_eq!(read(&tree, "inner/round").unwrap(), "inside");
        assert_eq!(read(&tree, ".").unwrap(), "directory");
        for escape in ["up/secret", "absolute/secret", "up", "absolute", "loop"] {
            assert!(
                matches!(read(&tree, escape), Err(TreeError::Escapes)),
                "{escape}"
            );
            assert!(
                matches!(tree.exists(&below(&tree, escape)), Err(TreeError::Escapes)),
                "{escape}"
            );
        }
        assert!(matches!(
            write(&tree, "up/new", "x"),
            Err(TreeError::Escapes)
        ));
        assert!(matches!(
            write(&tree, "absolute/a/b/new", "x"),
            Err(TreeError::Escapes)
        ));
        assert!(matches!(
            tree.list(&below(&tree, "up")),
            Err(TreeError::Escapes)
        ));
        assert!(matches!(
            tree.remove(&below(&tree, "up/secret"), true),
            Err(TreeError::Escapes)
        ));
        assert_eq!(std::fs::read_dir(&fixture.outside).unwrap().count(), 1);
    }
}

#[test]
fn a_written_file_appears_atomically_with_its_directories() {
    let fixture = fixture();
    for tree in trees(&fixture.base) {
        let pending = tree.create(&below(&tree, "new/a/b.txt")).unwrap();
        pending.writer().unwrap().write_all(b"half").unwrap();
        assert!(!tree.exists(&below(&tree, "new/a/b.txt")).unwrap());
        drop(pending);
        assert_eq!(
            tree.list(&below(&tree, "new/a")).unwrap().len(),
            0,
            "an uncommitted file leaves nothing"
        );
        write(&tree, "new/a/b.txt", "whole").unwrap();
        assert_eq!(read(&tree, "new/a/b.txt").unwrap(), "whole");
        write(&tree, "sideways/deeper/c", "through a link inside").unwrap();
        assert_eq!(
            read(&tree, "inner/deeper/c").unwrap(),
            "through a link inside"
        );
        tree.remove(&below(&tree, "new"), true).unwrap();
        tree.remove(&below(&tree, "inner/deeper"), true).unwrap();
    }
}

#[test]
fn replacing_a_file_keeps_its_mode_and_never_writes_through_a_link() {
    let fixture = fixture();
    for tree in trees(&fixture.base) {
        write(&tree, "script", "one").unwrap();
        std::fs::set_permissions(
            fixture.base.join("script"),
            std::fs::Permissions::from_mode(0o755),
        )
        .unwrap();
        write(&tree, "script", "two").unwrap();
        let mode = std::fs::metadata(fixture.base.join("script"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o755);

        symlink(fixture.outside.join("secret"), fixture.base.join("planted")).unwrap();
        write(&tree, "planted", "overwritten").unwrap();
        assert_eq!(
            std::fs::read_to_string(fixture.outside.join("secret")).unwrap(),
            "secret"
        );
        assert_eq!(read(&tree, "planted").unwrap(), "overwritten");
        tree.remove(&below(&tree, "planted"), false).unwrap();
        tree.remove(&below(&tree, "script"), false).unwrap();
    }
}

#[test]
fn listings_contain_every_entry() {
    let fixture = fixture();
    for tree in trees(&fixture.base) {
        let entries = tree.list(&below(&tree, "")).unwrap();
        let kinds: Vec<_> = entries
            .iter()
            .map(|entry| (entry.name.to_str().unwrap(), entry.kind))
            .collect();
        // Links that lead outside are listed as links.
        assert_eq!(
            kinds,
            [
                ("absolute", EntryKind::File),
                ("inner", EntryKind::Directory),
                ("loop", EntryKind::File),
                ("sideways", EntryKind::Directory),
                ("up", EntryKind::File)
            ]
        );
        assert!(matches!(
            tree.list(&below(&tree, "inner/file")),
            Err(TreeError::NotADirectory)
        ));
        assert!(matches!(
            tree.list(&below(&tree, "missing")),
            Err(TreeError::NotFound)
        ));
    }
}

#[test]
fn special_files_are_refused_at_once() {
    let fixture = fixture();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        fixture.base.join("fifo"),
        FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    for tree in trees(&fixture.base) {
        assert!(matches!(read(&tree, "fifo"), Err(TreeError::NotAFile)));
    }
}

#[test]
fn removal_deletes_links_and_not_their_targets() {
    let fixture = fixture();
    for tree in trees(&fixture.base) {
        write(&tree, "doomed/a/b", "x").unwrap();
        symlink(&fixture.outside, fixture.base.join("doomed/out")).unwrap();
        assert!(matches!(
            tree.remove(&below(&tree, "doomed"), false),
            Err(TreeError::NotEmpty)
        ));
        tree.remove(&below(&tree, "doomed"), true).unwrap();
        assert!(fixture.outside.join("secret").exists());
        assert!(matches!(
            tree.remove(&below(&tree, "doomed"), true),
            Err(TreeError::NotFound)
        ));
        assert!(tree.remove(&below(&tree, ""), true).is_err());
    }
}

/// One thread keeps swapping a directory for a link that leads outside, while others read and write through it.
#[test]
fn no_race_against_a_swapped_link_escapes() {
    let fixture = fixture();
    let base = &fixture.base;
    std::fs::create_dir(base.join("swap")).unwrap();
    std::fs::write(base.join("swap/secret"), "inside").unwrap();
    symlink("../outside", base.join("swap-link")).unwrap();
    let trees = trees(base);
    let finished = AtomicBool::new(false);
    let winners = AtomicUsize::new(0);
    let began = Instant::now();
    // For some time, and on a busy machine until every thread has read once.
    let goes_on = || {
        let limit = if winners.load(Ordering::Acquire) == trees.len() {
            Duration::from_millis(600)
        } else {
            Duration::from_secs(120)
        };
        began.elapsed() < limit
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while goes_on() {
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                let (one, other) = (base.join("swap"), base.join("swap-link"));
                rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, exchange)
                    .unwrap();
            }
            finished.store(true, Ordering::Release);
        });
        for tree in &trees {
            scope.spawn(|| {
                let mut reads = 0;
                while !finished.load(Ordering::Acquire) {
                    if let Ok(content) = read(tree, "swap/secret") {
                        assert_eq!(content, "inside");
                        winners.fetch_add(usize::from(reads == 0), Ordering::Release);
                        reads += 1;
                    }
                }
                assert!(reads > 0, "the race was never won");
            });
            scope.spawn(|| {
                while !finished.load(Ordering::Acquire) {
                    let _ = write(tree, "swap/written", "by the race");
                    let _ = write(tree, "swap/made/deep/written", "by the race");
                    let _ = tree.remove(&below(tree, "swap/made"), true);
                }
            });
        }
    });
    let outside: Vec<_> = std::fs::read_dir(&fixture.outside)
        .unwrap()
        .map(|found| found.unwrap().file_name())
        .collect();
    assert_eq!(outside, ["secret"]);
    assert_eq!(
        std::fs::read_to_string(fixture.outside.join("secret")).unwrap(),
        "secret"
    );
}

/// A change that code in the sandbox makes to the tree before a client requests a path.
#[derive(Clone, Debug)]
enum Step {
    Directory(String),
    File(String),
    Link { at: String, to: String },
}

/// Few names, so that paths often meet entries that steps have created.
fn path_of(parts: &'static str) -> impl Strategy<Value = String> {
    proptest::collection::vec(parts, 1..6).prop_map(|parts| parts.join("/"))
}

fn step() -> impl Strategy<Value = Step> {
    let inside = || path_of("[abc]");
    let target = prop_oneof![
        4 => path_of("(a|b|c|\\.\\.)"),
        1 => path_of("(a|b|\\.\\.|outside)").prop_map(|path| format!("/{path}")),
        1 => Just("../../../../../../etc/passwd".to_owned()),
        1 => Just("../outside/secret".to_owned()),
        1 => Just("OUTSIDE".to_owned()),
    ];
    prop_oneof![
        inside().prop_map(Step::Directory),
        inside().prop_map(Step::File),
        (inside(), target).prop_map(|(at, to)| Step::Link { at, to }),
    ]
}

/// Performs a step if the kernel permits it; impossible steps are ignored.
fn perform(fixture: &Fixture, step: &Step) {
    let parent = |path: &Path| {
        if let Some(parent) = path
            .parent()
            .filter(|parent| parent.starts_with(&fixture.base))
        {
            // Only directories are created, never through a link: these are the sandbox's own actions, within its tree.
            let resolved = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
            if resolved.starts_with(&fixture.base) {
                let _ = std::fs::create_dir_all(parent);
            }
        }
    };
    let is_inside = |path: &Path| {
        path.parent()
            .and_then(|parent| parent.canonicalize().ok())
            .is_some_and(|parent| parent.starts_with(&fixture.base))
    };
    let (Step::Directory(at) | Step::File(at) | Step::Link { at, .. }) = step;
    let path = fixture.base.join(at);
    parent(&path);
    if !is_inside(&path) || path.symlink_metadata().is_ok() {
        return;
    }
    match step {
        Step::Directory(_) => drop(std::fs::create_dir(&path)),
        Step::File(_) => drop(std::fs::write(&path, "inside")),
        Step::Link { to, .. } => {
            let outside = fixture.outside.to_string_lossy();
            let _ = symlink(to.replace("OUTSIDE", &outside), &path);
        }
    }
}

/// Everything outside the base directory that a test could reach, by name and content.
fn surroundings(fixture: &Fixture) -> Vec<(OsString, String)> {
    let mut found: Vec<_> = std::fs::read_dir(&fixture.outside)
        .unwrap()
        .chain(std::fs::read_dir(fixture.base.parent().unwrap()).unwrap())
        .map(|entry| {
            let entry = entry.unwrap();
            let content = std::fs::read_to_string(entry.path()).unwrap_or_default();
            (entry.file_name(), content)
        })
        .collect();
    found.sort();
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Whatever links a sandbox has created and whatever path is requested, nothing outside is read, listed, written or removed,
    /// and both ways of resolving a path agree.
    #[test]
    fn no_combination_of_links_leads_outside(
        steps in proptest::collection::vec(step(), 1..12),
        asked in proptest::collection::vec(path_of("(a|b|c|up|absolute|sideways|secret|\\.\\.|\\.)"), 1..8),
    ) {
        let fixture = fixture();
        for step in &steps {
            perform(&fixture, step);
        }
        let before = surroundings(&fixture);
        let trees = trees(&fixture.base);
        for sent in &asked {
            let Ok(path) = BelowBase::parse(&fixture.base, sent.as_bytes()) else {
                continue;
            };
            let seen: Vec<_> = trees.iter().map(|tree| look_at(tree, &path)).collect();
            prop_assert_eq!(&seen[0], &seen[1], "the two ways of resolving {} differ", sent);
            // The file outside, by its content and by its entry in a listing.
            for shown in ["Ok(\"secret\")", "(\"secret\", File, 6)", "root:"] {
                prop_assert!(!seen[0].contains(shown), "{} showed {}", sent, seen[0]);
            }
            for tree in &trees {
                let _ = write(tree, sent, "written");
                let _ = write(tree, &format!("{sent}/deep/er"), "written");
                if !path.is_base() {
                    let _ = tree.remove(&path, true);
                }
            }
        }
        prop_assert_eq!(before, surroundings(&fixture));
    }
}

/// Everything that a client can learn about a path.
fn look_at(tree: &Tree, path: &BelowBase) -> String {
    let read = tree.read(path).map(|node| match node {
        Node::Directory => "a directory".to_owned(),
        Node::File { mut file, .. } => {
            let mut content = String::new();
            let _ = file.read_to_string(&mut content);
            content
        }
    });
    let listed = tree.list(path).map(|entries| {
        let shown = entries
            .into_iter()
            .map(|entry| (entry.name, entry.kind, entry.size));
        shown.collect::<Vec<_>>()
    });
    let outcome = |error: &TreeError| matches!(error, TreeError::Escapes);
    format!(
        "{:?} {:?} {:?}",
        read.map_err(|error| outcome(&error)),
        listed.map_err(|error| outcome(&error)),
        tree.exists(path).map_err(|error| outcome(&error)),
    )
}
