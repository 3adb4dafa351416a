use super::*;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

const BUDGET: Budget = Budget {
    bytes: 1 << 20,
    entries: 100,
};

struct Case {
    /// The root is a subdirectory; everything else in this directory must stay unchanged.
    outside: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        let outside = tempfile::tempdir().unwrap();
        fs::create_dir(outside.path().join("root")).unwrap();
        fs::create_dir(outside.path().join("victim")).unwrap();
        fs::write(outside.path().join("victim/file"), "precious").unwrap();
        fs::write(outside.path().join("secret"), "precious").unwrap();
        Self { outside }
    }

    fn root(&self) -> PathBuf {
        self.outside.path().join("root")
    }

    fn extract(&self, archive: &[u8]) -> Result<Extracted, ExtractError> {
        let result = extract(archive, &self.root(), BUDGET, Ownership::possible());
        self.assert_untouched();
        result.map(|(extracted, _)| extracted)
    }

    fn assert_untouched(&self) {
        let mut names: Vec<_> = fs::read_dir(self.outside.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["root", "secret", "victim"]);
        assert_eq!(
            fs::read_dir(self.outside.path().join("victim"))
                .unwrap()
                .count(),
            1
        );
        for path in ["victim/file", "secret"] {
            let path = self.outside.path().join(path);
            assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
            assert_eq!(
                fs::metadata(&path).unwrap().nlink(),
                1,
                "a hard link to it was created"
            );
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        }
    }
}

#[derive(Debug, Clone)]
struct Item {
    kind: tar::EntryType,
    path: String,
    link: String,
    content: Vec<u8>,
    mode: u32,
}

fn item(kind: tar::EntryType, path: &str, link: &str, content: &[u8]) -> Item {
    Item {
        kind,
        path: path.to_owned(),
        link: link.to_owned(),
        content: content.to_vec(),
        mode: 0o644,
    }
}

fn file(path: &str) -> Item {
    item(tar::EntryType::Regular, path, "", b"content")
}

fn directory(path: &str) -> Item {
    Item {
        mode: 0o755,
        ..item(tar::EntryType::Directory, path, "", b"")
    }
}

/// Writes names directly into the header fields, because the `tar` crate refuses hostile names.
fn archive(items: &[Item]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for item in items {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(item.kind);
        header.set_size(item.content.len() as u64);
        header.set_mode(item.mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_000_000_000);
        let fields = header.as_old_mut();
        fields.name[..item.path.len()].copy_from_slice(item.path.as_bytes());
        fields.linkname[..item.link.len()].copy_from_slice(item.link.as_bytes());
        header.set_cksum();
        builder.append(&header, item.content.as_slice()).unwrap();
    }
    builder.into_inner().unwrap()
}

use tar::EntryType::{Char, Fifo, Link, Regular, Symlink};

#[test]
fn a_layer_is_unpacked_with_modes_times_and_links() {
    let case = Case::new();
    let items = [
        Item {
            mode: 0o1777,
            ..directory("tmp/")
        },
        Item {
            mode: 0o4755,
            ..file("./usr/bin/tool")
        },
        item(Link, "usr/bin/same", "usr/bin/tool", b""),
        item(Symlink, "bin", "usr/bin", b""),
        file("bin/through-a-link"),
        item(Fifo, "pipe", "", b""),
        item(Char, "dev/null", "", b""),
    ];
    let extracted = case.extract(&archive(&items)).unwrap();
    assert_eq!(
        extracted,
        Extracted {
            bytes: 14,
            entries: 7
        }
    );
    let stat = |path: &str| fs::symlink_metadata(case.root().join(path)).unwrap();
    assert_eq!(stat("tmp").mode() & 0o7777, 0o1777);
    assert_eq!(stat("tmp").mtime(), 1_000_000_000);
    assert_eq!(stat("usr/bin/tool").mtime(), 1_000_000_000);
    assert_eq!(stat("usr/bin/tool").ino(), stat("usr/bin/same").ino());
    if Ownership::possible() == Ownership::Preserved {
        assert_eq!(stat("usr/bin/tool").mode() & 0o7777, 0o4755);
    }
    assert_eq!(
        fs::read_to_string(case.root().join("usr/bin/through-a-link")).unwrap(),
        "content"
    );
    assert!(
        !case.root().join("dev/null").exists(),
        "a device node was created"
    );
}

#[test]
fn whiteouts_become_overlayfs_whiteouts() {
    let case = Case::new();
    let items = [
        file("etc/.wh.removed"),
        file("etc/kept"),
        file("etc/.wh.kept"),
        file("var/.wh..wh..opq"),
        file("var/.wh..wh.plnk"),
        file("again/.wh.dir"),
        directory("again/dir"),
    ];
    case.extract(&archive(&items)).unwrap();
    let stat = |path: &str| fs::symlink_metadata(case.root().join(path)).unwrap();
    let removed = stat("etc/removed");
    assert_eq!(
        (FileType::from_raw_mode(removed.mode()), removed.rdev()),
        (FileType::CharacterDevice, 0)
    );
    assert!(stat("etc/kept").is_file());
    let opaque = |path: &str| {
        let name = Ownership::possible().opaque_attribute();
        let mut value = [0; 1];
        rustix::fs::getxattr(case.root().join(path), name, &mut value).is_ok() && value == *b"y"
    };
    assert!(opaque("var") && opaque("again/dir") && !opaque("etc"));
    assert_eq!(fs::read_dir(case.root().join("var")).unwrap().count(), 0);
}

#[test]
fn no_entry_escapes_the_root() {
    let absolute = Case::new();
    let outside = absolute.outside.path().display().to_string();
    let cases: Vec<(&str, Vec<Item>, bool)> = vec![
        ("dots", vec![file("../escaped")], false),
        ("dots inside", vec![file("a/../../escaped")], false),
        (
            "an absolute path is below the root",
            vec![file("/etc/x")],
            true,
        ),
        (
            "a link up",
            vec![item(Symlink, "up", "..", b""), file("up/escaped")],
            true,
        ),
        (
            "an absolute link",
            vec![item(Symlink, "out", &outside, b""), file("out/escaped")],
            true,
        ),
        (
            "a link to a file",
            vec![item(Symlink, "f", "../secret", b""), file("f")],
            true,
        ),
        (
            "a link chain",
            vec![
                item(Symlink, "a", "..", b""),
                item(Symlink, "b", "a/victim", b""),
                file("b/file"),
            ],
            true,
        ),
        (
            "a hard link up",
            vec![item(Link, "h", "../secret", b"")],
            false,
        ),
        (
            "a hard link through a link",
            vec![
                item(Symlink, "up", "..", b""),
                item(Link, "h", "up/secret", b""),
            ],
            false,
        ),
        (
            "a hard link to a link",
            vec![
                item(Symlink, "s", "../secret", b""),
                item(Link, "h", "s", b""),
                file("h"),
            ],
            true,
        ),
        (
            "a hard link to a directory",
            vec![directory("d"), item(Link, "h", "d", b"")],
            false,
        ),
        ("a whiteout up", vec![file("d/.wh..")], false),
        ("a whiteout of two dots", vec![file("d/.wh...")], false),
        ("a file as root", vec![file("/")], false),
        (
            "a directory over a link",
            vec![
                item(Symlink, "d", "../victim", b""),
                Item {
                    mode: 0o777,
                    ..directory("d")
                },
            ],
            true,
        ),
        (
            "an opaque mark through a link",
            vec![item(Symlink, "d", "../victim", b""), file("d/.wh..wh..opq")],
            true,
        ),
    ];
    for (what, items, accepted) in cases {
        let case = Case::new();
        let result = case.extract(&archive(&items));
        assert_eq!(result.is_ok(), accepted, "{what}: {result:?}");
    }
    absolute.assert_untouched();
}

#[test]
fn archives_beyond_the_limits_are_refused_before_they_fill_the_disk() {
    let case = Case::new();
    let big = item(Regular, "big", "", &vec![0; 600 << 10]);
    let refused = case.extract(&archive(&[
        big.clone(),
        Item {
            path: "b2".into(),
            ..big
        },
    ]));
    assert!(
        matches!(refused, Err(ExtractError::TooLarge(_))),
        "{refused:?}"
    );
    let many: Vec<Item> = (0..101).map(|number| file(&format!("f{number}"))).collect();
    let refused = Case::new().extract(&archive(&many));
    assert!(
        matches!(refused, Err(ExtractError::TooMany(100))),
        "{refused:?}"
    );
}

#[test]
fn a_later_entry_replaces_an_earlier_one() {
    let case = Case::new();
    let items = [
        file("a/b/c"),
        item(Regular, "a/b", "", b"now a file"),
        directory("x"),
        item(Symlink, "x", "a", b""),
    ];
    case.extract(&archive(&items)).unwrap();
    assert_eq!(
        fs::read_to_string(case.root().join("a/b")).unwrap(),
        "now a file"
    );
    assert!(
        fs::symlink_metadata(case.root().join("x"))
            .unwrap()
            .is_symlink()
    );
}

fn any_name() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("a"),
        Just("b"),
        Just(".."),
        Just("."),
        Just("victim"),
        Just("secret"),
        Just(".wh.a"),
        Just(".wh..."),
        Just(".wh..wh..opq"),
        Just(""),
        Just("root"),
        Just("proc/self/root"),
    ];
    (any::<bool>(), proptest::collection::vec(part, 1..5)).prop_map(|(absolute, parts)| {
        format!("{}{}", if absolute { "/" } else { "" }, parts.join("/"))
    })
}

fn any_item() -> impl Strategy<Value = Item> {
    let kind = prop_oneof![
        Just(Regular),
        Just(Symlink),
        Just(Link),
        Just(tar::EntryType::Directory),
        Just(Fifo),
        Just(Char),
    ];
    (kind, any_name(), any_name(), 0_u32..0o10000).prop_map(|(kind, path, link, mode)| Item {
        content: if kind == Regular {
            b"overwritten".to_vec()
        } else {
            Vec::new()
        },
        kind,
        path,
        link,
        mode,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn random_archives_never_touch_anything_outside_the_root(items in proptest::collection::vec(any_item(), 1..12)) {
        let case = Case::new();
        // Symlinks that lead outside exist from the start, as if an earlier entry had created them.
        symlink("..", case.root().join("a")).unwrap();
        symlink(case.outside.path(), case.root().join("b")).unwrap();
        let _ = case.extract(&archive(&items));
        fs::set_permissions(case.root(), fs::Permissions::from_mode(0o755)).unwrap();
    }
}
