//! The certificates of a control plane for tests: one authority, and what it signs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

/// Signs certificates into a directory.
pub struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes an authority, and writes its certificate.
    pub fn new(directory: &Path) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "agent-sandbox-tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let authority = Self {
            directory: directory.to_owned(),
            issuer: Issuer::new(params.clone(), KeyPair::from_pem(&key.serialize_pem())?),
        };
        fs::write(authority.certificate(), params.self_signed(&key)?.pem())?;
        Ok(authority)
    }

    pub fn certificate(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Signs a certificate, good for clients and for servers of these names; its files are `<file>.crt` and `<file>.key`.
    pub fn sign(
        &self,
        file: &str,
        user: &str,
        group: Option<&str>,
        names: &[&str],
    ) -> anyhow::Result<(PathBuf, PathBuf)> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).context("names of a certificate")?;
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group);
        }
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let paths = (
            self.directory.join(format!("{file}.crt")),
            self.directory.join(format!("{file}.key")),
        );
        fs::write(&paths.0, certificate.pem())?;
        fs::write(&paths.1, key.serialize_pem())?;
        Ok(paths)
    }
}
